"""An exported directory where nothing is known of this project: transformers and torch only, offline."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.project import ROOT

from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.inference.filling import BlankFiller, GenerationConfig, blank_context
from megatron_lite.inference.open_run import load_run

TEXTS = ["word1 word2 [MASK] word3 . [sMASK] word4", "word9 word8 [MASK] .", "word3 word5 [gMASK]"]
LENGTH = 12

# Runs elsewhere. The forbidden packages cannot be imported even where they are installed. (deepspeed is not among
# them: transformers itself looks for it where accelerate is installed. What our files import is tested below.)
USER = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ImportError("not in this environment: " + name)

sys.meta_path.insert(0, Blocker())
import torch
from transformers import (AutoConfig, AutoModel, AutoModelForMultipleChoice, AutoModelForSeq2SeqLM,
                          AutoModelForSequenceClassification, AutoTokenizer, pipeline)

path, texts = {path!r}, {texts!r}
for cls in (AutoConfig, AutoModelForSeq2SeqLM):  # code runs only if the user says so
    try:
        cls.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    else:
        raise AssertionError("the directory's code ran without permission")

trust = dict(trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path, **trust)
model = AutoModelForSeq2SeqLM.from_pretrained(path, **trust).eval()
assert model.lm_head.weight is model.glm.embedding.word_embeddings.weight

inputs = tokenizer.build_inputs_for_generation(tokenizer(texts, padding=True))
written = model.generate(**inputs, max_new_tokens={length})[:, inputs["input_ids"].shape[1]:]
for options in (dict(num_beams=3), dict(do_sample=True)):
    model.generate(**inputs, max_new_tokens=3, **options)

fill = pipeline("blank-infilling", model=path, max_new_tokens={length}, **trust)
filled = [fill(text) for text in texts]
fill.save_pretrained({saved!r} + "_pipeline")
refill = pipeline("blank-infilling", model={saved!r} + "_pipeline", max_new_tokens={length}, **trust)
assert refill(texts) == filled
assert pipeline("feature-extraction", model=path, **trust)("word1")[0]
AutoModelForMultipleChoice.from_pretrained(path, **trust)
encoder = AutoModel.from_pretrained(path, **trust)
classifier = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, **trust)
assert len(pipeline("text-classification", model=classifier, tokenizer=tokenizer)("word1")) == 1

classifier.save_pretrained({saved!r})
tokenizer.save_pretrained({saved!r})
again = AutoModelForSequenceClassification.from_pretrained({saved!r}, **trust)
one = tokenizer("word1", return_tensors="pt")
assert torch.equal(again.eval()(**one).logits, classifier.eval()(**one).logits)
assert torch.equal(encoder.eval()(**one).last_hidden_state, classifier.glm(**one).last_hidden_state)
print(json.dumps(dict(written=written.tolist(), filled=filled)))
"""
OURS = ["megatron_lite", "data_utils"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, tree(write_vocabulary(directory)))
    export_run(directory, directory / "export", ExportOptions())
    return directory


def use_export(python: Path | str, run: Path, elsewhere: Path, forbidden: list[str]) -> dict:
    """What a user's script finds: token ids of the first blanks, the pipeline's answers."""
    elsewhere.mkdir(exist_ok=True)
    places = {"path": str(run / "export"), "saved": str(elsewhere / "saved")}
    code = USER.format(**places, texts=TEXTS, length=LENGTH, forbidden=forbidden)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(elsewhere / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [str(python), "-c", code]
    result = subprocess.run(arguments, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def assert_same_as_training(found: dict, run: Path, printed: list[dict]) -> None:
    opened = load_run(run)
    special = opened.tokenizer.special
    filler = BlankFiller(opened.model, special, GenerationConfig(max_length=LENGTH))
    for i, text in enumerate(TEXTS):
        spans = filler.fill(blank_context(opened.tokenizer.encode_with_specials(text), special))
        assert found["filled"][i]["span_ids"] == spans and 0 < len(spans[0]) < LENGTH
        assert found["written"][i][: len(spans[0])] == spans[0]
        assert found["filled"][i]["spans"] == printed[i]["spans"]
        assert found["filled"][i]["filled"] == printed[i]["filled"]


@pytest.fixture
def printed(run, monkeypatch, capsys):
    """What scripts/generate.py prints for the texts."""
    arguments = ["generate.py", "--checkpoint", str(run), "--json", "--max-length", str(LENGTH)]
    for text in TEXTS:
        arguments += ["--text", text]
    monkeypatch.setattr(sys, "argv", arguments)
    torch.manual_seed(0)
    runpy.run_path(str(ROOT / "scripts/generate.py"))["main"]()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_the_export_works_without_this_project(run, printed, tmp_path):
    found = use_export(sys.executable, run, tmp_path / "elsewhere", OURS)
    assert_same_as_training(found, run, printed)


def test_the_exported_code_imports_torch_and_transformers_only(run):
    """At its top level; sentencepiece is imported where a model needs it."""
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    files = list((run / "export").glob("*.py"))
    assert len(files) == 5
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= allowed, (file.name, names)


def installed_with(names: list[str]) -> set[str]:
    """Distributions that `names` need, directly or not, among those installed here."""
    needed, waiting = set(), list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in needed:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # optional, or for another platform
            continue
        needed.add(name)
        plain = [r for r in requirements if "extra ==" not in r]
        waiting += [re.match(r"[A-Za-z0-9._-]+", r)[0] for r in plain]
    return needed


@pytest.mark.slow
def test_the_export_works_in_a_virtual_environment_of_its_own(run, printed, tmp_path):
    """It holds transformers, torch and what they need, linked from this environment, and nothing else."""
    venv.create(tmp_path / "venv", system_site_packages=False, symlinks=True, with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name in installed_with(["torch", "transformers"]):
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            source = Path(importlib.metadata.distribution(name).locate_file(top))
            if top != ".." and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    assert not (site / "deepspeed").exists() and not (site / "sentencepiece").exists()
    found = use_export(tmp_path / "venv/bin/python", run, tmp_path / "elsewhere", [])
    assert_same_as_training(found, run, printed)
