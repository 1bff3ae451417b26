"""The script as a user runs it: files that load, equal bytes for equal input, one-line errors."""

import gzip
import json
import os
import subprocess
import sys

import pytest
import yaml
from support.project import ROOT

from data_utils.common.errors import ConfigError, DataError
from data_utils.tokenizers.special_tokens import SPECIAL_NAMES
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from scripts import train_tokenizer
from scripts.train_tokenizer import main

SCRIPT = ROOT / "scripts" / "train_tokenizer.py"
DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog, again and again. Is it quick?\n\nEnd: [MASK] <|endoftext|>",
    "Größe, naïve café, déjà vu! Привет, мир. 今天天气很好。你好？ 🙂🙂",
    "quicker, quickest; lazier, laziest; jumping, jumped; 1999 and 2000",
    "the quick answer to the quick question was the longest answer that anyone had ever given to a question",
    "a fox that jumps over another fox is not the fox that the dog had seen jumping over the garden wall",
] * 30
SIZES = {"hf_json": 320, "bert_wordpiece": 200, "sentencepiece": 360}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text file and a JSONL file."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.txt").write_text("\n".join(DOCUMENTS[:75]), encoding="utf-8")
    lines = [json.dumps({"body": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(DOCUMENTS[75:])]
    (directory / "b.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return directory


def arguments(kind, corpus, output, size=None):
    inputs = ["--input", str(corpus / "*.txt"), str(corpus / "b.jsonl"), "--text-key", "body"]
    return ["--kind", kind, *inputs, "--vocab-size", str(size or SIZES[kind]), "--output", str(output)]


def run_script(args):
    # A process of its own: the hash seeds that once made vocabularies differ are drawn per process.
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, check=False
    )


@pytest.mark.parametrize("kind", SIZES)
def test_same_input_same_bytes_and_the_printed_config_loads(kind, corpus, tmp_path):
    contents = []
    for name in ("first", "second"):
        result = run_script(arguments(kind, corpus, tmp_path / name))
        assert result.returncode == 0, result.stderr
        (path,) = (tmp_path / name).iterdir()  # no temporary file is left
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]

    config = yaml.safe_load(result.stdout)["tokenizer"]
    tokenizer = load_tokenizer(TokenizerConfig(**config))
    assert tokenizer.fingerprint in result.stdout and f"# {tokenizer.vocab_size} tokens" in result.stdout
    assert (
        tokenizer.vocab_size == SIZES[kind] + {"hf_json": 0, "bert_wordpiece": 5, "sentencepiece": 11}[kind]
    )
    assert tokenizer.decode(tokenizer.encode("the quick")) == "the quick"
    assert len(tokenizer.encode("the quick")) < 6  # words of the corpus are not spelled letter by letter


def test_hf_json_has_glm_tokens_first_and_is_lossless(corpus, tmp_path):
    main(arguments("hf_json", corpus, tmp_path / "out"))
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path / "out")))
    assert [tokenizer.token_to_text(i) for i in range(11)] == list(SPECIAL_NAMES.values())
    for text in DOCUMENTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_cased_wordpiece_keeps_case(corpus, tmp_path, capsys):
    main([*arguments("bert_wordpiece", corpus, tmp_path / "out"), "--no-lowercase"])
    config = TokenizerConfig(**yaml.safe_load(capsys.readouterr().out)["tokenizer"])
    tokenizer = load_tokenizer(config)
    assert not config.lowercase
    assert tokenizer.decode(tokenizer.encode("The quick")) == "The quick"


def test_wordpiece_alphabet_leaves_room_for_words(tmp_path):
    text = "".join(chr(0x4E00 + i) for i in range(500)) + " fox fox fox fox"
    (tmp_path / "a.txt").write_text(text * 3, encoding="utf-8")
    main(
        [
            "--kind",
            "bert_wordpiece",
            "--input",
            str(tmp_path / "a.txt"),
            "--vocab-size",
            "60",
            "--output",
            str(tmp_path),
        ]
    )
    vocab = (tmp_path / "vocab.txt").read_text(encoding="utf-8").split()
    assert "fox" in vocab and len(vocab) <= 60


def test_long_lines_reach_sentencepiece(tmp_path):
    """The library drops lines above 4192 bytes in silence."""
    (tmp_path / "a.txt").write_text("zebra crossing, zebra finch. " * 2000)
    args = ["--kind", "sentencepiece", "--vocab-size", "285", "--output", str(tmp_path)]
    main([*args, "--input", str(tmp_path / "a.txt")])
    tokenizer = load_tokenizer(TokenizerConfig(kind="sentencepiece", path=str(tmp_path)))
    assert len(tokenizer.encode("zebra finch")) < 6


def test_compressed_input_and_bad_records(tmp_path):
    """Files are read as scripts/preprocess_data.py reads them."""
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join([*lines[:5], "{", *lines[5:]]))
    options = ["--kind", "hf_json", "--vocab-size", "320", "--input"]
    main([*options, str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "a")])
    skipping = ["--on-bad-record", "skip", "--output", str(tmp_path / "b")]
    main([*options, str(tmp_path / "b.jsonl.gz"), *skipping])
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl:2: malformed JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl:1: there is no field 'text'"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: the line holds an array"),
        ("a.txt", b"caf\xe9\n", "a.txt:1: invalid UTF-8"),
        ("a.txt", b"", "a.txt has no text"),
        ("a.jsonl", b"", "a.jsonl has no text"),
    ],
)
@pytest.mark.parametrize("kind", SIZES)
def test_bad_input_is_named(kind, name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    args = [
        "--kind",
        kind,
        "--input",
        str(tmp_path / name),
        "--vocab-size",
        "300",
        "--output",
        str(tmp_path / "out"),
    ]
    with pytest.raises(DataError, match=message):
        main(args)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("hf_json", 266, "too small; 256 bytes and the special tokens need 267"),
        ("bert_wordpiece", 6, "too small"),
        ("sentencepiece", 100, r"too small; the characters of this text need \d+; raise it"),
        ("sentencepiece", 100_000, r"too large for this text; set it to \d+ or less"),
    ],
)
def test_impossible_sizes(kind, size, message, corpus, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        main(arguments(kind, corpus, tmp_path, size))
    assert "\n" not in str(caught.value)
    assert "character_coverage" not in str(caught.value)  # an option of the library, not of the script


def test_errors_are_one_line_and_status_2(corpus, tmp_path):
    missing = run_script(
        ["--kind", "hf_json", "--input", "none*", "--vocab-size", "300", "--output", str(tmp_path)]
    )
    assert missing.returncode == 2
    assert missing.stderr == (
        "error: input pattern none* matches no file; check the pattern (and quote it in the shell).\n"
    )


@pytest.mark.parametrize("size", [0, -5, 10**23])
def test_sizes_that_no_library_should_meet(size, corpus, tmp_path):
    with pytest.raises(ConfigError, match=f"--vocab-size is {size}; it must be in 1 to"):
        main(
            [
                *arguments("hf_json", corpus, tmp_path / "out")[:-4],
                "--vocab-size",
                str(size),
                "--output",
                "x",
            ]
        )


def test_an_output_that_cannot_be_is_refused_before_reading(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a.jsonl").write_text("not JSON")
    args = ["--kind", "hf_json", "--vocab-size", "300", "--input", str(tmp_path / "a.jsonl"), "--output"]
    with pytest.raises(DataError, match="file is not a writable directory; choose another --output"):
        main([*args, str(tmp_path / "file")])


def test_an_existing_tokenizer_is_not_overwritten(corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text("precious")
    with pytest.raises(DataError, match=r"tokenizer\.json exists"):
        main(arguments("hf_json", corpus, tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "precious"


@pytest.mark.parametrize("kind", SIZES)
def test_memory_that_runs_out_is_one_error(corpus, tmp_path, monkeypatch, kind):
    def texts(args):
        yield "one"
        raise MemoryError

    monkeypatch.setattr(train_tokenizer, "read_texts", texts)
    with pytest.raises(DataError, match="does not fit in memory; give a sample of it"):
        main(arguments(kind, corpus, tmp_path))


@pytest.mark.parametrize("kind", ["hf_json", "bert_wordpiece"])
def test_a_vocabulary_smaller_than_asked_for_is_reported(kind, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello world again world")
    args = ["--kind", kind, "--input", str(tmp_path / "a.txt"), "--vocab-size", "32000", "--output"]
    main([*args, str(tmp_path / "out")])
    warning = capsys.readouterr().err
    made = next((tmp_path / "out").iterdir())
    count = (
        len(json.loads(made.read_text())["model"]["vocab"])
        if kind == "hf_json"
        else len(made.read_text().split())
    )
    assert warning.startswith(f"warning: the vocabulary has {count:,} tokens instead of --vocab-size 32,000")
    if kind == "hf_json":  # of a smaller WordPiece vocabulary characters are only a half
        main([*args[:4], "--vocab-size", str(count), "--output", str(tmp_path / "as asked")])
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "a.model"])
def test_an_output_with_the_name_of_a_file_is_refused(corpus, tmp_path, name):
    with pytest.raises(ConfigError, match=rf"{name} must be a directory, in which tokenizer\.json"):
        main(arguments("hf_json", corpus, tmp_path / name))
    assert not (tmp_path / name).exists()
