"""scripts/dataset.py as a user runs it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "dataset.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_inspect_shows_documents_as_text(corpus):
    done = run("inspect", corpus / "corpus_train", "--documents", 2)
    assert done.returncode == 0, done.stderr
    assert "bert_wordpiece" in done.stdout and done.stdout.count("--- document ") == 2
    assert "word" in done.stdout.split("--- document ")[2]


def test_verify_merge_and_stats(corpus, tmp_path):
    parts = [corpus / "corpus_train", corpus / "corpus_validation"]
    done = run("merge", *parts, "--output", tmp_path / "all")
    assert done.returncode == 0 and "400 documents" in done.stdout, done.stderr
    done = run("stats", tmp_path / "all", "--histogram", tmp_path / "h.png", "--tokens")
    assert done.returncode == 0 and "percentiles" in done.stdout and "'word" in done.stdout, done.stderr
    assert (tmp_path / "h.png").exists()
    data = bytearray((tmp_path / "all.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "all.bin").write_bytes(data)
    done = run("verify", *parts, tmp_path / "all")
    assert done.returncode == 2 and done.stdout.count("all good") == 2
    assert done.stderr.count("\n") == 1 and "begins at byte 0" in done.stderr
