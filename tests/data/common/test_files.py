"""Files of the scripts: whole or not at all, and refused early."""

import errno
import os
import stat

import pytest

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.files import (
    copy_files,
    disk_errors,
    new_directory,
    new_file,
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
    write_whole(tmp_path / "vocab.txt", b"new", "--output")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "vocab.txt").read_text() == "new" and not (tmp_path / "vocab.txt").is_symlink()


def test_a_leftover_that_cannot_be_removed_is_named_and_stays(tmp_path, monkeypatch):
    """As another user's in /tmp."""
    (tmp_path / "vocab.txt.partial").write_text("theirs")

    def refuse(path, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    refused = pytest.raises(DataError, match=r"\(\S*vocab\.txt\.partial: Operation not permitted\)")
    with refused, disk_errors(tmp_path / "vocab.txt"), new_file(tmp_path / "vocab.txt"):
        pass
    assert (tmp_path / "vocab.txt.partial").read_text() == "theirs"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_file_systems_that_do_not_sync_directories_hold_results(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def refuse_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    write_whole(tmp_path / "file", b"whole", "--output")
    with new_directory(tmp_path / "out") as made:
        (made / "file").write_bytes(b"whole")
    assert {(path / "file").read_bytes() for path in (tmp_path, tmp_path / "out")} == {b"whole"}


def test_modes_are_not_copied(tmp_path, monkeypatch):
    """Some file systems refuse them."""

    def refuse(path, *arguments, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    (tmp_path / "from/below").mkdir(parents=True)
    (tmp_path / "from/below/file").write_text("text")
    for name in ("chmod", "utime"):
        monkeypatch.setattr(os, name, refuse)
    copy_files(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to/below/file").read_text() == "text"


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
