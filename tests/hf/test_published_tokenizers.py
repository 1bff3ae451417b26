"""A directory's tokenizer becomes a run's, with the ids of AutoTokenizer; what cannot be served is refused by name."""

import json
import random
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from support.hf.published_tokenizers import BYTES, SCRIPTS, add_json, combinations, theirs_of, write_files
from tokenizers.pre_tokenizers import ByteLevel

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from data_utils.common.settings import build
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.hf.common.verify_tokenizer import (
    awkward_texts,
    compare_exported,
    compare_tokenizer,
    load_theirs,
)
from megatron_lite.hf.published.tokenizers import (
    copy_tokenizer_files,
    import_tokenizer,
    require_same_ids,
    write_tokenizer,
)

SYSTEMS = (
    *(
        "bert",
        "ernie",
        "roberta",
        "gpt2",
        "bart",
        "gpt",
        "albert",
        "xlnet",
        "t5",
        "glm4",
        "mt5",
        "xlm_roberta",
    ),
    *("camembert", "llama", "llama3", "qwen2", "eurobert", "deberta_v3"),
)
MATRIX = [(system, options) for system in SYSTEMS for options in combinations(system)]
# Each option once in each state, and the systems without options.
REDUCED = [
    *[("bert", options) for options in (
        {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": True},
        {"do_lower_case": False},
    )],
    ("roberta", {"add_prefix_space": True}),
    ("gpt2", {"add_prefix_space": False}),
    *[(system, options) for system in ("albert", "xlnet") for options in (
        {}, {"do_lower_case": system == "xlnet", "keep_accents": True, "remove_space": False},
    )],
    *[(system, {}) for system in ("gpt", "t5", "glm4", "xlm_roberta", "camembert", "llama", "qwen2", "eurobert")],
    ("deberta_v3", {}), ("deberta_v3", {"do_lower_case": True, "split_by_punct": True}),
]  # fmt: skip
SPECIAL = ("[", "]", "<", ">")  # texts of the random mixture spell no special token


def name_of(value):
    return value if isinstance(value, str) else "".join(str(int(flag)) for flag in value.values()) or "plain"


def brought(directory, **options):
    """The tokenizer of a run that is imported from a directory."""
    kept = directory / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    shutil.copyfile(directory / "config.json", kept / "config.json")
    copy_tokenizer_files(directory, kept)
    section = import_tokenizer(directory, kept, {"added_tokens": "none", **options})
    return load_tokenizer(build(TokenizerConfig, section))


def mixture(count, seed=0):
    """Random texts of awkward pieces and prose."""
    rng = random.Random(seed)
    pieces = [text for text in awkward_texts() if not any(mark in text for mark in SPECIAL)]
    words = " ".join(text for text in SCRIPTS if not any(mark in text for mark in SPECIAL)).split(" ")
    return [
        rng.choice(("", " ", " ", "\n")).join(rng.choice(rng.choice((pieces, words))) for _ in range(n))
        for n in (rng.randint(1, 12) for _ in range(count))
    ]


def differing(tokenizer, directory, texts):
    """Texts of which AutoTokenizer, asked here and by nothing of ours, has other ids."""
    expected = theirs_of(directory)(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [text for text, ids in zip(texts, expected, strict=True) if tokenizer.encode(text) != ids]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def connect(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", connect)


def check(system, options, directory, count):
    write_files(system, directory, **options)
    texts = mixture(count)
    for with_json in (False, True):
        if with_json:
            if system in BYTES:
                return
            add_json(directory)
        tokenizer = brought(directory)
        assert differing(tokenizer, directory, texts) == []
        found = compare_tokenizer(tokenizer, directory)
        assert found.differing == 0 and found.texts > 400 and found.spelled < found.texts / 5


# Each class of tokenizer once: words, bytes, words of bytes, SentencePiece's two models, and BPE of a rare form.
@pytest.mark.parametrize(
    ("system", "options"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (i not in (0, 3, 5, 8, 9, 12, 14, 18)), id=name_of(case[0])
        )
        for i, case in enumerate(REDUCED)
    ],
)
def test_a_run_encodes_as_auto_tokenizer(system, options, tmp_path):
    """Without tokenizer.json and with it."""
    check(system, options, tmp_path / "published", 300)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "options"), MATRIX, ids=name_of)
def test_every_option_of_every_system(system, options, tmp_path):
    check(system, options, tmp_path / "published", 10_000)


def test_files_that_suffice_are_used_as_they_came(tmp_path):
    """So that corpora of the published files fit; what a class adds to them is in a tokenizer.json of its own."""
    write_files("bert", tmp_path / "bert", do_lower_case=False)
    found = brought(tmp_path / "bert").config
    assert (found.kind, found.lowercase) == ("bert_wordpiece", False) and found.path.endswith(
        "kept/vocab.txt"
    )
    write_files("gpt2", tmp_path / "gpt2")
    assert brought(tmp_path / "gpt2").config.kind == "gpt2_bpe"
    assert not (tmp_path / "gpt2/kept/tokenizer").exists()
    write_files("albert", tmp_path / "albert")
    assert brought(tmp_path / "albert").config.path.endswith("kept/tokenizer/tokenizer.json")
    add_json(tmp_path / "albert")
    assert brought(tmp_path / "albert").config.path.endswith("kept/tokenizer.json")
    assert not (tmp_path / "albert/kept/tokenizer").exists()


def test_options_decide_over_a_tokenizer_json(tmp_path):
    """As in the classes: what tokenizer_config.json says of accents counts, whatever the tokenizer's file holds."""
    write_files("albert", tmp_path / "albert")
    add_json(tmp_path / "albert")
    (tmp_path / "albert/tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    tokenizer = brought(tmp_path / "albert")
    assert tokenizer.config.path.endswith("kept/tokenizer/tokenizer.json")
    assert differing(tokenizer, tmp_path / "albert", mixture(100)) == []


@pytest.mark.parametrize(
    ("described", "parts"),
    [
        (
            {"tokenizer_class": "BertJapaneseTokenizer"},
            ("BertJapaneseTokenizer", "supported are", "vocab.txt"),
        ),
        ({"tokenizer_class": "BertweetTokenizer"}, ("BertweetTokenizer", "supported are")),
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}, ("supported are",)),
    ],
)
def test_tokenizers_of_other_code_are_refused_by_name(tmp_path, described, parts):
    write_files("bert", tmp_path / "bert")
    (tmp_path / "bert/tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises((CheckpointError, ConfigError)) as error:
        brought(tmp_path / "bert")
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("model_type", "reads"),
    [
        ("modernbert", "tokenizer.json"), ("llama", "tokenizer.json"),
        ("t5", "tokenizer.json, or spiece.model"), ("roberta", "tokenizer.json, or vocab.json with merges.txt"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_the_class_does_not_read_is_refused_with_what_it_reads(model_type, reads, tmp_path):
    write_files("bert", tmp_path / "bert")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / "bert" / name).unlink(missing_ok=True)
    (tmp_path / "bert/config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError) as refusal:
        brought(tmp_path / "bert")
    assert "has vocab.txt, but" in str(refusal.value) and f"reads {reads}; fetch" in str(refusal.value)
    assert "supported" not in str(refusal.value)
    if model_type == "modernbert":  # the command of the message
        command = str(refusal.value).partition("python -c ")[2]
        subprocess.run([sys.executable, "-c", *shlex.split(command)], check=True, capture_output=True)
        tokenizer = brought(tmp_path / "bert")
        assert tokenizer.config.kind == "bert_wordpiece" and tokenizer.encode("the film")


def test_a_vocabulary_without_its_merges_is_refused_by_name(tmp_path):
    write_files("gpt2", tmp_path / "gpt2")
    for name in ("merges.txt", "tokenizer.json"):
        (tmp_path / "gpt2" / name).unlink(missing_ok=True)
    with pytest.raises(
        CheckpointError, match=r"has vocab\.json, but .* vocab\.json with merges\.txt; fetch what lacks$"
    ):
        brought(tmp_path / "gpt2")


def test_a_tokenizer_with_other_ids_is_refused_with_the_text(tmp_path):
    write_files("bert", tmp_path / "bert", do_lower_case=False)
    path = str(tmp_path / "bert/vocab.txt")
    own = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=path, added_tokens="none"))
    with pytest.raises(
        CheckpointError, match=r"^tokenizer\.path .* than BertTokenizer of \d+ of \d+ texts: '"
    ):
        require_same_ids("tokenizer", own, tmp_path / "bert", tmp_path / "bert")
    with pytest.raises(
        CheckpointError, match=r"by tokenizer\.kind bert_wordpiece .* leave tokenizer\.kind and its"
    ):
        brought(tmp_path / "bert", kind="bert_wordpiece", lowercase=True)
    with pytest.raises(ConfigError, match=r"no files for tokenizer\.kind 'gpt2_bpe'"):
        brought(tmp_path / "bert", kind="gpt2_bpe")
    write_files("albert", tmp_path / "albert")
    with pytest.raises(
        CheckpointError, match=r"by tokenizer\.kind sentencepiece gives other ids than AlbertTokenizer"
    ):
        brought(tmp_path / "albert", kind="sentencepiece")


def test_a_refusal_names_what_is_wrong_with_the_tokenizer_not_with_the_first_kind_tried(tmp_path):
    source, run = tmp_path / "released", tmp_path / "run"
    source.mkdir()
    symbols = sorted(set(ByteLevel.alphabet()) - {"\u0120"})  # no space: of kana alone
    names = ["[UNK]", "[PAD]", "<s>", "</s>", *symbols]
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "</s>"}
    files = {
        "config.json": {"model_type": "gpt2"},
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", **roles},
        "vocab.json": {name: i for i, name in enumerate(names)},
    }
    for name, content in files.items():
        (source / name).write_text(json.dumps(content))
    (source / "merges.txt").write_text("#version: 0.2\n")
    shutil.copytree(source, run)
    with pytest.raises(DataError, match=r"no token \(20\)") as error:
        import_tokenizer(source, run, {"added_tokens": "none"})
    assert str(source) in str(error.value) and str(run) not in str(error.value)


def test_spelled_special_tokens_are_the_only_exception(tmp_path):
    """A piece of the class's model: text is one there, never here. Nothing else may differ in such a text's class."""
    write_files("xlnet", tmp_path / "xlnet")
    theirs, tokenizer = load_theirs(tmp_path / "xlnet"), brought(tmp_path / "xlnet")
    text = "the <cls> of"
    cls = theirs.cls_token_id
    assert cls in theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert cls not in tokenizer.encode(text)
    found = compare_tokenizer(tokenizer, tmp_path / "xlnet", ["the cls of"])
    assert 0 < found.spelled < 60 and found.differing == 0


@pytest.mark.parametrize(
    ("system", "files", "before", "after"),
    [("bert", "glm4", ["cls"], ["sep"]), ("xlnet", "bert", [], ["sep", "cls"]), ("gpt2", "glm4", [], []),
     ("t5", "glm4", [], ["eos"]), ("roberta", "gpt2", [], []), ("roberta", "bert", ["cls"], ["sep"])],
)  # fmt: skip
def test_an_export_of_any_tokenizer_loads_as_the_runs_own(tmp_path, system, files, before, after):
    """Also where the class of the system would read the files in its own way. Tokens around a text are the system's."""
    write_files(files, tmp_path / "own", **({"do_lower_case": False} if files == "bert" else {}))
    tokenizer = brought(tmp_path / "own", **({"added_tokens": "glm"} if files == "glm4" else {}))
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text(json.dumps({"model_type": system}))
    roles = {"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls"}
    ids = {n: getattr(tokenizer.special, role) for n, role in roles.items() if role not in tokenizer.lacking}
    write_tokenizer(
        export, tokenizer, ids, tmp_path / "none", system, has_segments=system in ("bert", "xlnet")
    )
    compare_exported(tokenizer, export)
    assert differing(tokenizer, export, mixture(100)) == []
    first, last = ([getattr(tokenizer.special, role) for role in part] for part in (before, after))
    assert theirs_of(export)("the fox")["input_ids"] == [*first, *tokenizer.encode("the fox"), *last]


def test_an_export_that_no_class_can_read_is_refused(tmp_path):
    """A raw SentencePiece model: the classes normalize otherwise."""
    write_files("xlnet", tmp_path / "own")
    path = str(tmp_path / "own/spiece.model")
    tokenizer = load_tokenizer(TokenizerConfig(kind="sentencepiece", path=path, added_tokens="none"))
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    write_tokenizer(export, tokenizer, {}, tmp_path / "none", "xlnet", has_segments=True)
    with pytest.raises(
        CheckpointError, match=r"^tokenizer\.kind sentencepiece gives other ids .*--no-verify"
    ):
        compare_exported(tokenizer, export)
