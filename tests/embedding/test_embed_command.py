"""scripts/embed.py: rows in the order of the texts, whole or not at all, the same after a kill."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.commands import assert_refused, forked
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.project import ROOT
from support.waiting import wait_until

from megatron_lite.embedding.embedder import Embedder, TextFormat
from megatron_lite.inference.open_run import load_run

TEXTS = [" word1 ä ", *(f"word{i % 60} word{i % 7} ." + " word3" * (i % 5) for i in range(2500))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("embed")
    write_run(directory / "run", tree(write_vocabulary(directory)))
    (directory / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return directory / "run"


def embed(run, source, output, *options):
    return forked("scripts/embed.py", "--checkpoint", run, "--input", source, "--output", output, *options)


def test_rows_are_those_of_the_texts_in_every_format(run, tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:40])
    (tmp_path / "texts.jsonl").write_text(lines)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:40]))
    parquet.write_table(pa.table({"body": TEXTS[:40]}), tmp_path / "texts.parquet")
    opened = load_run(run)
    expected = Embedder(opened, TextFormat(opened)).embed(TEXTS[:40])
    for name, options in (("txt", ()), ("jsonl", ()), ("parquet", ("--text-key", "body"))):
        done = embed(run, tmp_path / f"texts.{name}", tmp_path / f"{name}.npy", *options)
        assert done.returncode == 0, done.stderr
        found = np.load(tmp_path / f"{name}.npy")
        assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-5
        # As a dataset of text pairs has them, whose queries these are.
        hashes = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in TEXTS[:40])
        assert (tmp_path / f"{name}.npy.hash").read_bytes() == hashes
    assert "40 vectors of 32 numbers" in done.stdout
    done = embed(run, tmp_path / "texts.txt", tmp_path / "vectors.parquet", "--dimensions", "8")
    assert done.returncode == 0, done.stderr
    table = parquet.read_table(tmp_path / "vectors.parquet").to_pydict()
    assert table["text"] == TEXTS[:40]
    cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    assert np.abs(np.array(table["vector"]) - cut).max() < 1e-5


def test_a_killed_command_continues_with_equal_bytes_for_any_number_of_processes(run, tmp_path):
    source = run.parent / "texts.txt"
    assert embed(run, source, tmp_path / "whole.npy", "--processes", "1").returncode == 0
    output = tmp_path / "vectors.npy"
    command = [sys.executable, ROOT / "scripts/embed.py", "--checkpoint", run, "--input", source]
    command += ["--output", output, "--processes", "2"]
    process = subprocess.Popen([str(each) for each in command])
    parts = output.with_name(".vectors.npy.megatron_lite_parts")
    wait_until(lambda: any(parts.glob("*.npy")) or output.exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("*.npy")}
    assert embed(run, source, output, "--processes", "2").returncode == 0 or not kept
    assert output.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "vectors.npy", "vectors.npy.hash", "whole.npy", "whole.npy.hash",
    ]  # fmt: skip


def test_parts_of_other_settings_are_not_taken_for_these(run, tmp_path):
    source, output = run.parent / "texts.txt", tmp_path / "vectors.npy"
    parts = tmp_path / ".vectors.npy.megatron_lite_parts"
    parts.mkdir()
    (parts / f"{0:064}.npy").write_bytes(b"another")
    assert embed(run, source, output).returncode == 0
    assert embed(run, source, tmp_path / "raw.npy", "embedding.normalize=false").returncode == 0
    vectors, raw = np.load(output), np.load(tmp_path / "raw.npy")
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    assert np.abs(raw / np.linalg.norm(raw, axis=1, keepdims=True) - vectors).max() < 1e-5
    assert np.abs(raw - vectors).max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "query"), "is unknown; embedding.prompts has none."),
        (("--batch-tokens", "0"), "--batch-tokens is 0; it must be at least 1."),
        (("model.num_layers=3",), "only settings of embedding can be replaced."),
        (("embedding.pooling=max",), "embedding.pooling"),
        (("--dimensions", "64"), "--dimensions is 64, but the vectors"),
    ],
)
def test_mistakes_are_refused_in_one_line(run, options, message, tmp_path):
    assert_refused(embed(run, run.parent / "texts.txt", tmp_path / "out.npy", *options), message)
    assert not list(tmp_path.iterdir())


def test_texts_without_words_are_refused(run, tmp_path):
    (tmp_path / "texts.txt").write_text("word1\n\nword2\n")
    done = embed(run, tmp_path / "texts.txt", tmp_path / "out.npy")
    assert_refused(done, "1 of the records")
    done = embed(run, tmp_path / "texts.txt", tmp_path / "texts.txt")
    assert_refused(done, "its name must end in .npy, .parquet")
