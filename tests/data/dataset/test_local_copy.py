import errno
import multiprocessing
import os
import shutil

import pytest
from support.crash_shim import at_every_operation, fill_disk
from support.data.corpora import build, damage

from data_utils.common.errors import DataError, run_command
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.local_copy import local_copy
from data_utils.dataset.verification import verify


def test_a_copy_is_made_once_and_again_after_a_rebuild(tmp_path):
    build(tmp_path / "d", [[1, 2], [3]])
    first = local_copy(tmp_path / "d", tmp_path / "local")
    made = first.with_name(f"{first.name}.bin").stat().st_mtime_ns
    verify(IndexedDataset(first))
    assert local_copy(tmp_path / "d", tmp_path / "local") == first
    assert first.with_name(f"{first.name}.bin").stat().st_mtime_ns == made
    build(tmp_path / "d", [[4, 5], [6]])
    second = local_copy(tmp_path / "d", tmp_path / "local")
    assert second != first and IndexedDataset(second).document(0).tolist() == [4, 5]


def test_a_dataset_with_the_same_tokens_and_another_manifest_is_copied_again(tmp_path):
    """Else a copy would be of the old tokenizer for ever."""
    copies = []
    for eos in (1, 2):
        build(tmp_path / "d", [[1, 2], [3]], eos=eos)
        copies.append(local_copy(tmp_path / "d", tmp_path / "local"))
        assert IndexedDataset(copies[-1]).manifest == IndexedDataset(tmp_path / "d").manifest
    assert copies[0] != copies[1]


def test_another_dataset_under_the_name_of_the_copy_is_refused(tmp_path):
    build(tmp_path / "d", [[1, 2], [3]])
    copy = local_copy(tmp_path / "d", tmp_path / "local")
    build(copy, [[9]])
    with pytest.raises(
        DataError, match=r"has the name of a copy of .*/d but different content; remove it or choose"
    ):
        local_copy(tmp_path / "d", tmp_path / "local")


def test_ranks_of_a_node_copy_at_the_same_time(tmp_path):
    build(tmp_path / "d", [[1, 2, 3]] * 1000)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        copies = pool.starmap(local_copy, [(tmp_path / "d", tmp_path / "local")] * 4)
    assert len(set(copies)) == 1
    verify(IndexedDataset(copies[0]))
    assert not list((tmp_path / "local").glob("*.partial"))


def test_a_damaged_source_leaves_no_copy(tmp_path):
    build(tmp_path / "d", [[1, 2], [3]])
    damage(tmp_path / "d.bin", lambda data: data.__setitem__(0, 7))
    with pytest.raises(DataError, match="block at byte 0 "):
        local_copy(tmp_path / "d", tmp_path / "local")
    assert [path.suffix for path in (tmp_path / "local").iterdir()] == [".lock"]


def test_too_little_space_is_one_error(tmp_path, monkeypatch):
    build(tmp_path / "d", [[1, 2], [3]])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DataError, match="has 1 free"):
        local_copy(tmp_path / "d", tmp_path / "local")


@pytest.mark.parametrize("suffix", [".lock", ".bin.partial", ".idx", ".json", ".json.partial"])
def test_links_that_others_have_put_there_are_not_followed(tmp_path, suffix):
    """A node's directory for temporary files is everyone's."""
    build(tmp_path / "d", [[1, 2], [3]])
    copy = local_copy(tmp_path / "d", tmp_path / "known")
    mine = tmp_path / "mine"
    mine.write_text("precious")
    planted = tmp_path / "local" / f"{copy.name}{suffix}"
    planted.parent.mkdir()
    planted.symlink_to(mine)
    if not suffix.endswith(".partial"):  # which is replaced
        with pytest.raises(DataError, match=r"symbolic link"):
            local_copy(tmp_path / "d", tmp_path / "local")
    assert mine.read_text() == "precious"
    planted.unlink(missing_ok=True)  # the link itself may be cleared away
    verify(IndexedDataset(local_copy(tmp_path / "d", tmp_path / "local")))
    assert mine.read_text() == "precious"


def test_a_whole_copy_of_another_user_is_read(tmp_path, monkeypatch):
    build(tmp_path / "d", [[1, 2], [3]])
    copy = local_copy(tmp_path / "d", tmp_path / "local")
    os_open = os.open

    def open_to_read(path, flags, *arguments, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_to_read)
    assert local_copy(tmp_path / "d", tmp_path / "local") == copy
    with pytest.raises(
        DataError, match=r"other/\S+\.lock: Permission denied\); choose another data.local_dir"
    ):
        local_copy(tmp_path / "d", tmp_path / "other")


def test_a_copy_that_finds_the_disk_full_leaves_nothing(tmp_path):
    build(tmp_path / "d", [[1, 2, 3]] * 100)

    def before():
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        return tmp_path / "journal"

    def after(status, err):
        assert status == 2 and err.count("error: ") == err.count("\n") == 1 and "No space left" in err, err
        assert not list(tmp_path.glob("local/*.partial"))

    def copy():
        run_command(lambda: local_copy(tmp_path / "d", tmp_path / "local") and None)

    assert at_every_operation(fill_disk, copy, before, after) > 10
