"""The script as a user runs it: files that load, equal bytes for equal input, one-line errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data_utils.tokenizers import SPECIAL_NAMES, TokenizerConfig, load_tokenizer
from megatron_lite.errors import DataError
from scripts.train_tokenizer import find_inputs, main, read_texts, write_atomically

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_tokenizer.py"
DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog, again and again. Is it quick?\n\nEnd: [MASK] <|endoftext|>",
    "Größe, naïve café, déjà vu! Привет, мир. 今天天气很好。你好？ 🙂🙂",  # noqa: RUF001
    "quicker, quickest; lazier, laziest; jumping, jumped; 1999 and 2000",
    "the quick answer to the quick question was the longest answer that anyone had ever given to a question",
    "a fox that jumps over another fox is not the fox that the dog had seen jumping over the garden wall",
] * 30
SIZES = {"byte_bpe": 320, "wordpiece": 200, "sentencepiece": 360}


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
    assert tokenizer.vocab_size == SIZES[kind] + {"byte_bpe": 0, "wordpiece": 5, "sentencepiece": 11}[kind]
    assert tokenizer.decode(tokenizer.encode("the quick")) == "the quick"
    assert len(tokenizer.encode("the quick")) < 6  # words of the corpus are not spelled letter by letter


def test_byte_bpe_has_glm_tokens_first_and_is_lossless(corpus, tmp_path):
    main(arguments("byte_bpe", corpus, tmp_path / "out"))
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path / "out")))
    assert [tokenizer.token_to_text(i) for i in range(11)] == list(SPECIAL_NAMES.values())
    for text in DOCUMENTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_cased_wordpiece_keeps_case(corpus, tmp_path, capsys):
    main([*arguments("wordpiece", corpus, tmp_path / "out"), "--cased"])
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
            "wordpiece",
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


def test_text_blocks_keep_every_character(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.train_tokenizer.BLOCK_BYTES", 10)
    text = "\n".join(DOCUMENTS[:6])
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    blocks = list(read_texts([tmp_path / "a.txt"], "text"))
    assert "".join(blocks) == text and len(blocks) > 6


def test_inputs_are_sorted_and_unique(corpus):
    assert find_inputs([str(corpus / "b*"), str(corpus / "*")]) == [corpus / "a.txt", corpus / "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl, line 1: no text under 'text'"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: no text under 'text'"),
        ("a.txt", b"caf\xe9\n", "a.txt is not UTF-8"),
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
        ("byte_bpe", 266, "too small; 256 bytes and the special tokens take 267"),
        ("wordpiece", 6, "too small"),
        ("sentencepiece", 100, "cannot train this size"),
        ("sentencepiece", 100_000, "Please set it to a value <="),
    ],
)
def test_impossible_sizes(kind, size, message, corpus, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        main(arguments(kind, corpus, tmp_path, size))
    assert "\n" not in str(caught.value)


def test_errors_are_one_line_and_status_2(corpus, tmp_path):
    missing = run_script(
        ["--kind", "byte_bpe", "--input", "none*", "--vocab-size", "300", "--output", str(tmp_path)]
    )
    assert missing.returncode == 2
    assert missing.stderr == "error: --input none* matches no file; check the path and quote the pattern.\n"


def test_an_existing_tokenizer_is_not_overwritten(corpus, tmp_path):
    (tmp_path / "tokenizer.json").write_text("precious")
    with pytest.raises(DataError, match=r"tokenizer\.json exists"):
        main(arguments("byte_bpe", corpus, tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "precious"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "vocab.txt"
    path.write_text("old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(DataError, match="No space left on device"):
        write_atomically(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
