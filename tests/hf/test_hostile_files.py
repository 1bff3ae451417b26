"""Files that a library would read for minutes, or as another model, are refused in one line before they are parsed."""

from __future__ import annotations

import json
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import forked
from support.hf.published_files import edit, write_directory
from support.selection import slow_but

from data_utils.common.errors import CheckpointError
from megatron_lite.hf.common.weights import MAX_TENSORS
from megatron_lite.hf.importing import import_directory

TREE = {"training": {"steps": 6}}
MATRIX = "model.layers.0.mlp.Wo.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("published") / "modernbert"
    write_directory("modernbert", directory)
    return directory


@pytest.fixture
def directory(published, tmp_path):
    return shutil.copytree(published, tmp_path / "modernbert")


def with_tensors(change):
    def write(directory):
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return write


def with_pickle(change):
    def write(directory):
        path = directory / "model.safetensors"
        torch.save(change(load_file(path)), directory / "pytorch_model.bin")
        path.unlink()

    return write


def compressed(directory):
    with_pickle(dict)(directory)
    stored = directory / "pytorch_model.bin"
    stored.rename(directory / "stored.zip")
    with zipfile.ZipFile(directory / "stored.zip") as old, zipfile.ZipFile(stored, "w", 8) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    (directory / "stored.zip").unlink()


def long_index(directory):
    table = {"weight_map": {f"x.{i}": "model.safetensors" for i in range(MAX_TENSORS + 1)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))


def with_tokenizer(change, name="tokenizer.json"):
    def write(directory):
        path = directory / name
        tree = json.loads(path.read_text()) if path.exists() else {}
        change(tree)
        path.write_text(json.dumps(tree))

    return write


def replaced(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def nested(tree):
    step = replaced({"String": "a"}, "aa")
    for _ in range(25):
        step = {"type": "Sequence", "normalizers": [step, replaced({"String": "a"}, "aa")]}
    tree["normalizer"] = step


CASES = {
    "tensors": (
        with_tensors(lambda t: t | {f"x.{i}": torch.zeros(1) for i in range(MAX_TENSORS)}), "has 60,0.. tensors"),
    "pickled tensors": (
        with_pickle(lambda t: t | {f"x.{i}": t[MATRIX] for i in range(MAX_TENSORS)}), "has 60,0.. tensors"),
    "names": (with_tensors(lambda t: t | {"x" * 9_000_000: torch.zeros(1)}), "lists its tensors in 9,"),
    "index": (long_index, "index.json has 60,001 tensors"),
    "compressed": (compressed, "compressed archive.*as safetensors"),
    "stride 0": (with_pickle(lambda t: t | {MATRIX: torch.zeros(1).expand(t[MATRIX].shape)}), "Wo.weight has more"),
    "no storage": (with_pickle(lambda t: t | {MATRIX: t[MATRIX].to("meta")}), "Wo.weight has more"),
    "sparse": (with_pickle(lambda t: t | {MATRIX: t[MATRIX].to_sparse()}), "Wo.weight has more"),
    "layers": (lambda d: edit(d, num_hidden_layers=2 * 10**9), "num_hidden_layers 2000000000"),
    "lines": (lambda d: (d / "vocab.txt").write_text("a\n" * 1_000_000), "vocab.txt has 2,000,000 bytes"),
    "pieces": (lambda d: (d / "spiece.model").write_bytes(b"\n" * 2_000_000), "spiece.model has 2,000,000 bytes"),
    "asked": (with_tokenizer(lambda t: t.update(extra_ids=10**9), "tokenizer_config.json"), "1,000,000,000 extra_ids"),
    "replacements": (with_tokenizer(nested), "replaces characters.* times as long"),
    "code": (
        lambda d: edit(d, auto_map={"AutoModelForMaskedLM": "bert_layers.BertForMaskedLM"}),
        r"auto_map names code of its own \(bert_layers.BertForMaskedLM\).*remove auto_map"),
    "other code": (
        lambda d: edit(d, model_type="new", auto_map={"AutoModel": "org/impl--modeling.NewModel"}),
        r"'new', which cannot be imported \(auto_map names code of its own \(org/impl--modeling.NewModel\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(set(CASES) - {"tensors"}, CASES))
def test_what_no_model_needs_is_refused(directory, tmp_path, name):
    change, message = CASES[name]
    change(directory)
    with pytest.raises(CheckpointError, match=message) as refusal:
        import_directory(directory, tmp_path / "run", TREE)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["modernbert"]


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
def test_a_regular_expression_that_tries_too_much_is_an_error(directory, tmp_path, place):
    pattern = {"Regex": "(x+x+)+y"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    steps = {
        "normalizer": replaced(pattern, "a"),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}],
        },
    }
    with_tokenizer(lambda tree: tree.update({place: steps[place]}))(directory)
    done = forked(
        "scripts/convert_checkpoint.py", "import", "--input", directory, "--output", tmp_path / "run"
    )
    *_, last = done.stderr.splitlines()  # after the panic, which the library prints itself
    assert done.returncode == 2 and last.startswith("error: ") and "retry-limit-in-match" in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_index_may_name_a_tied_head(directory, tmp_path):
    """An index that names a tied head, which no file holds."""
    import transformers

    tensors = load_file(directory / "model.safetensors")
    table = dict.fromkeys([*tensors, "decoder.weight"], "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    transformers.ModernBertForMaskedLM.from_pretrained(directory)
    assert import_directory(directory, tmp_path / "run", TREE) is not None
