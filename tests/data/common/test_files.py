"""Files of the scripts: whole or not at all, and refused early."""

import os

import pytest

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.files import (
    require_directory,
    require_new_directory,
    require_prefix,
    require_writable,
    write_picture,
    write_whole,
)


def test_a_file_is_written_whole(tmp_path):
    write_whole(tmp_path / "new/vocab.txt", b"words", "--output")
    assert (tmp_path / "new/vocab.txt").read_bytes() == b"words"
    assert len(list((tmp_path / "new").iterdir())) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(error, tmp_path, monkeypatch):
    path = tmp_path / "vocab.txt"
    path.write_text("old")

    def fail(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((DataError, KeyboardInterrupt), match=r"No space left on device|^$"):
        write_whole(path, b"new", "--output")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_that_someone_planted_is_not_followed(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "vocab.txt.partial").symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match="choose another --output"):
        write_whole(tmp_path / "vocab.txt", b"new", "--output")
    assert (tmp_path / "theirs").read_text() == "theirs" and not (tmp_path / "vocab.txt").exists()


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    require_writable(tmp_path / "new/deep/file", "--output")
    assert not (tmp_path / "new").exists()
    with pytest.raises(
        DataError, match=r"--output .*file is not a writable directory; choose another --output"
    ):
        require_writable(tmp_path / "file/x/y", "--output")
    for directory in (tmp_path, tmp_path / ".."):
        with pytest.raises(DataError, match="is a directory; give the name of a file"):
            require_writable(directory, "--output")
    with pytest.raises(DataError, match="file/x: File exists; choose another --output"):
        write_whole(tmp_path / "file/x", b"", "--output")


def test_new_directories(tmp_path):
    for path in (tmp_path / "new/deep", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        require_new_directory(path)
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    for path in (tmp_path / "full", tmp_path / "full/file"):
        with pytest.raises(DataError, match="exists; choose a new directory"):
            require_new_directory(path)
    with pytest.raises(DataError, match="full/file is not a writable directory"):
        require_new_directory(tmp_path / "full/file/new")


def test_directories_and_prefixes(tmp_path):
    require_directory(tmp_path, "")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="absent does not exist; give a run"):
        require_directory(tmp_path / "absent", "give a run")
    with pytest.raises(DataError, match="file is not a directory; give a run"):
        require_directory(tmp_path / "file", "give a run")
    require_prefix("data/corpus")
    for prefix in ("", "data/", ".", "/"):
        with pytest.raises(ConfigError, match="is not a file prefix"):
            require_prefix(prefix)
    for suffix in (".bin", ".idx", ".json"):  # else there were files data/corpus.bin.bin
        with pytest.raises(ConfigError, match=rf"corpus\{suffix}' must be a prefix .*; give data/corpus\."):
            require_prefix(f"data/corpus{suffix}")
    require_prefix("data/corpus.v1")


class Figure:
    """Stands for a figure of matplotlib, which refuses endings that are no kind of picture."""

    def savefig(self, file, format, dpi):
        if format != "png":
            raise ValueError(f"Format {format!r} is not supported")
        file.write(b"picture")


def test_a_picture_is_written_whole_in_a_directory_that_is_made(tmp_path):
    write_picture(tmp_path / "new/a.png", Figure(), "--plot")
    assert (tmp_path / "new/a.png").read_bytes() == b"picture" and len(list(tmp_path.rglob("*"))) == 2
    with pytest.raises(DataError, match=r"--plot .*a\.png/b\.png: File exists"):
        write_picture(tmp_path / "new/a.png/b.png", Figure(), "--plot")
    with pytest.raises(DataError, match=r"--plot .*a\.txt: .*give a name in \.png"):
        write_picture(tmp_path / "new/a.txt", Figure(), "--plot")
