"""Files of vectors of entities that cannot be used, and their conversion from text."""

import os

import numpy as np
import pytest

from data_utils.common.errors import DataError
from data_utils.dataset.vectors import Vectors, convert_vectors


def write(kind, path):
    rows = np.ones((4, 3), np.float32)
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "archive":
        np.savez(path, a=rows, b=rows)
        os.replace(f"{path}.npz", path)
    elif kind == "damaged archive":
        path.write_bytes(b"PK\x03\x04 and no more")
    elif kind == "cut off":
        np.save(path, rows)
        path.write_bytes(path.read_bytes()[:-5])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "objects":
        np.save(path, np.array([{}, {}], object), allow_pickle=True)
    else:
        rows[2, 1] = {"nan": np.nan, "infinite": -np.inf}[kind]
        np.save(path, rows)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "not a NumPy array"),
        ("archive", "is an archive"),
        ("damaged archive", "not a NumPy array"),
        ("cut off", "not a NumPy array"),
        ("pipe", "is a pipe"),
        ("objects", "not a NumPy array"),
        ("nan", "row 2 has a value that is not finite"),
        ("infinite", "row 2 has a value that is not finite"),
    ],
)
def test_vectors_that_cannot_be_used(tmp_path, kind, message):
    write(kind, tmp_path / "v.npy")
    with pytest.raises(DataError, match=message):
        Vectors(str(tmp_path / "v.npy"), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"v\.txt: cannot be read \(No such file or directory\)"),
        ("[1, 2]\n", r"v\.txt:1: the line must hold finite numbers alone"),
        (
            "2 3\n1 2 3\n",
            r"v\.txt:2: the line must hold 2 finite numbers, as line 1 does",
        ),  # word2vec's first line
    ],
)
def test_text_that_holds_no_vectors_is_named(tmp_path, text, message):
    """A text that does not exist was called an output that cannot be written."""
    if text is not None:
        (tmp_path / "v.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        convert_vectors(str(tmp_path / "v.txt"), str(tmp_path / "v.npy"))
    assert os.listdir(tmp_path) == ["v.txt"] * (text is not None)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "v.txt")
    with pytest.raises(DataError, match=r"v\.txt is a pipe"):
        convert_vectors(str(tmp_path / "v.txt"), str(tmp_path / "v.npy"))
    assert sorted(os.listdir(tmp_path)) == ["v.txt"]
