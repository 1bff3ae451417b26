"""The encoders that a build may name: the library's ids and equal datasets, or one line.

A stand-in of gigatoken shows how it is called and what happens where it is wrong. What is true of the package itself is
asked of it where it is installed.
"""

import importlib.util
import json
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from support.commands import forked
from support.data.builds import build, finished_shards, outputs
from support.data.corpora import to_jsonl
from support.data.tokenizer_files import CORPUS, KIND_OF, LITERALS, byte_bpe_json, texts, write_all
from support.selection import slow_but

from data_utils.common.errors import ConfigError, DataError
from data_utils.tokenizers.fast import package_encoders
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

STAND_IN = """
import json, multiprocessing, os
import tokenizers

made = []

class Tokenizer:
    @classmethod
    def from_json(cls, text):
        if multiprocessing.parent_process() is not None:
            assert os.environ["RAYON_NUM_THREADS"] == "1"
        if json.loads(text)["model"]["type"] != "BPE":
            raise BaseException("unsupported model\\n\\nLocation:\\n    hf.rs:241")
        new = cls()
        new.backend = tokenizers.Tokenizer.from_str(text)
        made.append(new)
        return new

    def encode_batch(self, texts, *, parallel):
        assert parallel is False
        rows = [self.backend.encode(text.decode(), add_special_tokens=False).ids for text in texts]
        for text, row in zip(texts, rows):
            if row and "TRIGGER" in text.decode():
                row[-1] += 1
        return rows
"""
AWKWARD = """
import numpy as np
flatten = lambda rows, axis: np.array([i for row in rows for i in row], np.uint32)
num = lambda rows, axis: np.array([len(row) for row in rows])
"""
NAMES = ("gpt2", "json", "added")
AWKWARD_TEXTS = [
    *("", "a \ud800 b", "x" * 5000, "the quick brown fox " * 5000, "\x00", "\ufffd", *LITERALS, *CORPUS),
    *("quickly, the quick fox", "a\u302e\U0001d165\u0897"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_all(root)
    tree = byte_bpe_json(["[PAD]", "<|endoftext|>"])
    token = {
        **tree["added_tokens"][0],
        "id": len(tree["model"]["vocab"]),
        "content": "quick",
        "special": False,
    }
    (root / "added").mkdir()
    (root / "added/tokenizer.json").write_text(
        json.dumps({**tree, "added_tokens": [*tree["added_tokens"], token]})
    )
    return root


def load(files, name, encoder="library"):
    config = TokenizerConfig(kind={**KIND_OF, "added": "hf_json"}[name], path=str(files / name))
    return load_tokenizer(config, encoder)


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Writes a stand-in of the package, wrong for texts with a trigger, where this process and workers find them."""
    modules = {name: sys.modules.pop(name, None) for name in ("gigatoken", "awkward")}

    def write(trigger="no such text"):
        directory = tmp_path / "packages"
        directory.mkdir()
        (directory / "gigatoken.py").write_text(STAND_IN.replace("TRIGGER", ascii(trigger)[1:-1]))
        (directory / "awkward.py").write_text(AWKWARD)
        monkeypatch.syspath_prepend(directory)

    yield write
    for name, module in modules.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def check(tokenizer, library, block):
    ids, lengths = tokenizer.encode_batch(block)
    right_ids, right_lengths = library.encode_batch(block)
    assert ids.dtype == np.int32 and lengths.dtype == np.int64
    assert ids.tolist() == right_ids.tolist() and lengths.tolist() == right_lengths.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_librarys(files, stand_ins, name):
    stand_ins()
    tokenizer, library = load(files, name, "gigatoken"), load(files, name)
    check(tokenizer, library, AWKWARD_TEXTS)
    check(tokenizer, library, [])
    check(tokenizer, library, [""])


@pytest.mark.parametrize("name", slow_but(["json"], NAMES))
@pytest.mark.parametrize("trigger", ["\u0897\u302e", "x" * 101])
def test_a_package_with_other_ids_is_refused(files, stand_ins, name, trigger):
    stand_ins(trigger)
    with pytest.raises(ConfigError, match=r"--encoder gigatoken and .* different ids"):
        load(files, name, "gigatoken")


def test_a_package_that_misses_an_added_token_is_refused(files, stand_ins):
    stand_ins("aquickb")
    load(files, "gpt2", "gigatoken")
    with pytest.raises(ConfigError, match="different ids"):
        load(files, "added", "gigatoken")


@pytest.mark.parametrize(
    ("name", "encoder"),
    [("bert", "gigatoken"), ("unigram", "gigatoken"), ("unigram", "compiled")]
    + [("sentencepiece", encoder) for encoder in ("compiled", "gigatoken")],
)
def test_an_encoder_for_other_tokenizers_is_refused_in_one_line(files, stand_ins, name, encoder):
    """Also if the package panics."""
    stand_ins()
    with pytest.raises(ConfigError, match=f"^--encoder {encoder} .*auto") as error:
        load(files, name, encoder)
    assert "\n" not in str(error.value) and "hf.rs" not in str(error.value)


def test_the_words_that_gigatoken_remembers_are_bounded(files, stand_ins, monkeypatch):
    stand_ins()
    monkeypatch.setattr(package_encoders, "LOAD_AGAIN_BYTES", 100)
    tokenizer, library = load(files, "gpt2", "gigatoken"), load(files, "gpt2")
    made = importlib.import_module("gigatoken").made
    before = len(made)
    for _ in range(3):
        check(tokenizer, library, [*CORPUS, "x" * 200])
    assert len(made) == before + 3


def test_a_build_continues_with_another_encoder_to_the_same_bytes(tmp_path, files, stand_ins):
    """In a worker process, which loads the encoder again."""
    stand_ins()
    path = tmp_path / "input.jsonl"
    path.write_text(to_jsonl(CORPUS[:40]) + "{\n")
    tokenizer = partial(load_tokenizer, TokenizerConfig(kind="gpt2_bpe", path=str(files / "gpt2")))
    options = {"shard_bytes": 1000, "split": ""}
    build(path, tmp_path / "a/c", partial(tokenizer, "library"), **options, on_bad_record="skip")
    with pytest.raises(DataError, match="malformed"):
        build(path, tmp_path / "b/c", partial(tokenizer, "compiled"), **options)
    assert finished_shards(tmp_path / "b/c") > 1
    skipping = {**options, "on_bad_record": "skip", "workers": 1}
    report = build(path, tmp_path / "b/c", partial(tokenizer, "gigatoken"), **skipping)
    assert 1 < report.finished_before < report.shards
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")


# ---- the command ----


def run(directory, files, encoder, name="gpt2", *options):
    (directory / "in.jsonl").write_text(to_jsonl(CORPUS))
    corpus = ["--input", "in.jsonl", "--output", "out/c", "--workers", "1", "--encoder", encoder]
    kind = ["--tokenizer-kind", KIND_OF[name], "--tokenizer-path", files / name]
    return forked("scripts/preprocess_data.py", *corpus, *kind, *options, cwd=directory)


def assert_refused(done, message, directory):
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert message in done.stderr
    assert not (directory / "out").exists()


def test_a_missing_package_is_named_before_any_work(tmp_path, files, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gigatoken" else find(name))
    done = run(tmp_path, files, "gigatoken", "gpt2", "--tokenizer-path", "absent")
    assert_refused(done, "pip install gigatoken", tmp_path)


def test_the_command_builds_with_the_encoder_that_is_named(tmp_path, files, stand_ins):
    stand_ins("no word of the sample")
    assert run(tmp_path, files, "gigatoken").returncode == 0
    first = outputs(tmp_path / "out")
    assert run(tmp_path, files, "library", "gpt2", "--overwrite").returncode == 0
    assert outputs(tmp_path / "out") == first


def test_the_command_refuses_a_wrong_encoder(tmp_path, files, stand_ins):
    stand_ins("'s")
    assert_refused(run(tmp_path, files, "gigatoken"), "--encoder auto", tmp_path)


@pytest.mark.parametrize("option", [["--capitals"], ["--spans-key", "spans"]])
def test_an_encoder_that_would_not_run_is_refused(tmp_path, files, option):
    assert_refused(run(tmp_path, files, "compiled", "gpt2", *option), option[0], tmp_path)


# ---- the package itself ----


@pytest.fixture(scope="module")
def installed(files):
    """Tokenizers with the package and with the library."""
    pytest.importorskip("gigatoken")
    return [(load(files, name, "gigatoken"), load(files, name)) for name in NAMES]


@given(text=texts)
@settings(deadline=None, max_examples=200)
def test_installed_packages_give_the_librarys_ids(installed, text):
    for tokenizer, library in installed:
        check(tokenizer, library, [text, "", text])


def test_installed_packages_give_the_librarys_ids_of_awkward_texts(installed):
    for tokenizer, library in installed:
        check(tokenizer, library, AWKWARD_TEXTS)
        check(tokenizer, library, [])
