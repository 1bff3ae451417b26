"""scripts/dataset.py as a user runs it."""

import shutil
import struct
from pathlib import Path

import numpy as np
from support.commands import forked
from support.project import ROOT

from data_utils.dataset.manifest import SUFFIXES

SCRIPT = ROOT / "scripts" / "dataset.py"


def run(*arguments):
    return forked("scripts/dataset.py", *arguments)


def test_inspect_shows_documents_as_text(corpus):
    done = run("inspect", corpus / "corpus_train", "--documents", 2)
    assert done.returncode == 0, done.stderr
    assert "bert_wordpiece" in done.stdout and done.stdout.count("--- document ") == 2
    assert "word" in done.stdout.split("--- document ")[2]
    assert not set("{}") & set(done.stdout.split("--- document ")[0]), (
        "a mapping of Python is no text for people"
    )


def test_verify_merge_and_stats(corpus, tmp_path):
    parts = [corpus / "corpus_train", corpus / "corpus_validation"]
    done = run("merge", *parts, "--output", tmp_path / "all")
    assert done.returncode == 0 and "400 documents" in done.stdout, done.stderr
    done = run("inspect", tmp_path / "all", "--documents", 0)
    assert "\n  sources: 2, the first " in done.stdout, done.stdout
    done = run("stats", tmp_path / "all", "--histogram", tmp_path / "h.png", "--tokens")
    assert done.returncode == 0 and "percentiles" in done.stdout and "'word" in done.stdout, done.stderr
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    assert run("stats", tmp_path / "all", "--histogram", tmp_path / "h.svg").returncode == 0
    assert "<svg" in (tmp_path / "h.svg").read_text()
    for name, message in (
        ("h.foo", "its name must end in .png, .svg, .pdf"),
        ("all.bin/h.png", "not a writable"),
    ):
        done = run("stats", tmp_path / "all", "--histogram", tmp_path / name)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
        assert message in done.stderr and not (tmp_path / name).exists()
    data = bytearray((tmp_path / "all.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "all.bin").write_bytes(data)
    done = run("verify", *parts, tmp_path / "all")
    assert done.returncode == 2 and done.stdout.count("all good") == 2
    assert done.stderr.count("\n") == 1 and "block at byte 0" in done.stderr


def test_files_of_another_program_are_adopted(corpus, tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}/corpus_train{suffix}", tmp_path / f"theirs{suffix}")
    done = run("verify", tmp_path / "theirs")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    advised = done.stderr.split("python scripts/dataset.py ")[1].split()
    assert advised == ["adopt", str(tmp_path / "theirs")]
    assert run(*advised).returncode == 0
    done = run("inspect", tmp_path / "theirs", "--documents", 1)
    assert done.returncode == 0 and "adopted: True" in done.stdout and "has no tokenizer" in done.stderr
    done = run("stats", tmp_path / "theirs", "--tokens")
    assert done.returncode == 0 and "the most frequent" in done.stdout, done.stderr


def test_sentences_of_another_program(tmp_path):
    """Joined to documents, and said; a tokenizer cannot be named for such a dataset."""
    prefix, header = tmp_path / "d", struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3)
    (tmp_path / "d.bin").write_bytes(np.arange(5, dtype="<u2").tobytes())
    (tmp_path / "d.idx").write_bytes(header + struct.pack("<3i3q3q", 2, 1, 2, 0, 4, 6, 0, 2, 3))
    done = run("adopt", prefix)
    assert done.returncode == 0 and "d: 2 documents, 5 tokens" in done.stdout, done.stderr
    assert "3 sequences are joined to documents" in done.stdout
    done = run("inspect", prefix)
    assert "num_sequences: 3" in done.stdout and "document 0, 3 tokens\n0 1 2\n" in done.stdout
    done = run("inspect", prefix, "--tokenizer-path", tmp_path)
    assert done.returncode == 2 and "the manifest has no tokenizer" in done.stderr
    (tmp_path / "d.json").unlink()
    done = run("adopt", prefix, "--by-sequence")
    assert done.returncode == 0 and "d: 3 documents" in done.stdout and "joined" not in done.stdout


def test_ids_beyond_the_vocabulary_are_one_line(corpus, tmp_path):
    for suffix in SUFFIXES:
        shutil.copy(f"{corpus}/corpus_train{suffix}", tmp_path / f"d{suffix}")
    data = bytearray((tmp_path / "d.bin").read_bytes())
    data[:2] = b"\xff\xff"
    (tmp_path / "d.bin").write_bytes(data)
    done = run("inspect", tmp_path / "d")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "d.bin has the id 65535 in document 0, but the tokenizer has" in done.stderr


def test_lengths_that_cannot_be_are_one_line(corpus, tmp_path):
    """Between those that opening compares; a length of 2^31 - 1 would take 16 GiB."""
    for length in (-3, 2**31 - 1):
        for suffix in SUFFIXES:
            shutil.copy(f"{corpus}/corpus_train{suffix}", tmp_path / f"d{suffix}")
        data = bytearray((tmp_path / "d.idx").read_bytes())
        data[34 + 4 * 3 : 34 + 4 * 4] = struct.pack("<i", length)
        (tmp_path / "d.idx").write_bytes(data)
        done = run("stats", tmp_path / "d")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"d.idx records a document of {length} tokens" in done.stderr


def test_what_is_surely_a_mistake_is_refused(corpus, tmp_path):
    prefix = corpus / "corpus_train"
    for arguments, message in (
        (["merge", prefix, prefix, "--output", tmp_path / "all"], f"{prefix} is given twice"),
        (["inspect", prefix, "--documents", "-5"], "--documents is -5; it must be 0 or more."),
        (["inspect", "absent"], f"check the prefix (relative to {Path.cwd()}) or build the dataset"),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr, (
            done.stderr
        )
        assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
