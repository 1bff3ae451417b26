"""The ids of a run's texts equal those in a process that has nothing but transformers and the directory."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from support.hf.published import random_model
from support.hf.published_files import tensors_once
from support.hf.published_tokenizers import write_files

from megatron_lite.hf.common.verify_tokenizer import awkward_texts
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run

# Reads {directory: texts} and prints {directory: ids}. Nothing of this project can be imported where it runs.
PROGRAM = """
import json, sys
from transformers import AutoTokenizer
asked = json.load(sys.stdin)
found = {}
for directory, texts in asked.items():
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    found[directory] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
json.dump(found, sys.stdout)
"""
CASES = {
    "bert": ({"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False}, "masked_lm"),
    "roberta": ({"add_prefix_space": True}, "masked_lm"),
    "gpt2": ({}, "causal"),
    "albert": ({}, "albert"),
    "xlnet": ({"do_lower_case": True}, "xlnet"),
    "t5": ({}, "t5"),
}
TREE = {"training": {"steps": 1, "precision": "fp32"}, "data": {"sequence_length": 30}}


def asked_outside(directory, texts):
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM],
        cwd=directory,
        input=json.dumps({str(path): part for path, part in texts.items()}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """By case: the directory that is imported, its run, and the export of the run."""
    root = tmp_path_factory.mktemp("tokenizers")
    for case, (options, objective) in CASES.items():
        size = write_files(case, root / case / "original", **options)
        rows = size + 3 if case == "t5" else size  # T5 has rows that no token uses
        small = {"num_layers": 1, "num_decoder_layers": 1} if case == "t5" else {}
        random_model(case, vocab_size=rows, **small).save_pretrained(root / case / "original")
        import_directory(root / case / "original", root / case / "run", TREE | {"objectives": {objective: 1}})
        export_run(root / case / "run", root / case / "export", ExportOptions(verify=False))
    return root


def test_texts_have_the_same_ids(directories):
    texts = [text for text in awkward_texts() if not any(mark in text for mark in "[]<>")]
    assert len(texts) > 200
    paths = [directories / case / name for case in CASES for name in ("original", "export")]
    found = asked_outside(directories, dict.fromkeys(paths, texts))
    for case in CASES:
        tokenizer = open_run(directories / case / "run").tokenizer
        ours = [tokenizer.encode(text) for text in texts]
        for name in ("original", "export"):
            theirs = found[str(directories / case / name)]
            wrong = [text for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]
            assert wrong == [], (case, name)


@pytest.mark.parametrize("case", CASES)
def test_every_file_of_the_tokenizer_comes_back(directories, case):
    original, export = directories / case / "original", directories / case / "export"
    names = {path.name for path in original.iterdir()} - {
        "config.json",
        "model.safetensors",
        "generation_config.json",
    }
    assert names & {"vocab.txt", "vocab.json", "spiece.model"}
    assert [name for name in names if (export / name).read_bytes() != (original / name).read_bytes()] == []
    assert tensors_once(export).keys() == load_file(original / "model.safetensors").keys()
