import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data.corpora import build, damage

from data_utils.common import checksums
from data_utils.common.checksums import FileChecksums, check_entry, damaged_block, difference, identity
from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import manifest_bytes


@pytest.fixture
def blocks_of_16(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 16)


def sums_of(*parts):
    sums = FileChecksums()
    for part in parts:
        sums.update(part)
    return sums


@given(st.lists(st.binary(max_size=100), max_size=8))
def test_how_the_bytes_arrive_does_not_matter(parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK_BYTES", 16)
        data = b"".join(parts)
        blocks = [data[start : start + 16] for start in range(0, len(data), 16)]
        crc32 = b"".join(zlib.crc32(block).to_bytes(4, "big") for block in blocks).hex()
        assert sums_of(*parts).tree() == {"block_bytes": 16, "crc32": crc32}


def test_arrays_of_any_type_are_bytes():
    array = np.arange(1000, dtype="<u2")
    assert sums_of(array.data, array[:0].data).tree() == sums_of(array.tobytes()).tree()


@pytest.mark.parametrize("place", range(40))
def test_any_changed_byte_is_found_in_its_block(tmp_path, blocks_of_16, place):
    data = bytearray(range(40))
    recorded = sums_of(data).tree()
    assert difference(recorded, sums_of(data)) is None
    data[place] ^= 1
    (tmp_path / "file").write_bytes(data)
    block = place // 16
    assert damaged_block(tmp_path / "file", recorded, range(3)) == 16 * block
    assert damaged_block(tmp_path / "file", recorded, {0, 1, 2} - {block}) is None
    assert difference(recorded, sums_of(data)).startswith(f"is damaged: the block at byte {16 * block} ")


def test_another_length_is_a_difference(blocks_of_16):
    recorded = sums_of(bytes(32)).tree()
    assert "different size" in difference(recorded, sums_of(bytes(16)))
    assert "different size" in difference(recorded, sums_of(bytes(48)))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_some_blocks_of_a_dataset(tmp_path, blocks_of_16, monkeypatch, suffix):
    draws = np.random.default_rng(0)
    monkeypatch.setattr(np.random, "default_rng", lambda: draws)
    dataset = build(tmp_path / "d", [[i % 200 + 1] for i in range(300)])
    size = (tmp_path / f"d{suffix}").stat().st_size
    dataset.verify_some(4)
    damage(tmp_path / f"d{suffix}", lambda data: data.__setitem__(size // 2, data[size // 2] ^ 1))
    with pytest.raises(DataError, match=f"d{suffix} is damaged: the block at byte"):
        dataset.verify_some(10**6)
    found = 0
    for _ in range(300):
        try:
            dataset.verify_some(4)
        except DataError:
            found += 1
    # A start finds one damaged block among n with probability 4 / n; 300 starts, five standard deviations.
    chance = 4 / -(-size // 16)
    assert abs(found - 300 * chance) <= 5 * (300 * chance * (1 - chance)) ** 0.5


def test_identity_tells_datasets_apart(tmp_path):
    one, other, same = (
        build(tmp_path / name, rows) for name, rows in zip("abc", ([[1]], [[2]], [[1]]), strict=True)
    )
    first, second, third = (identity(dataset.manifest["files"][".bin"]) for dataset in (one, other, same))
    assert first == third != second and len(first) == 64


@pytest.mark.parametrize(
    "entry",
    [
        {"block_bytes": 0},
        {"crc32": ""},
        {"crc32": 7},
        {"crc32": "0" * 16},
        {"block_bytes": 1},
        {"bytes": None},
    ],
)
def test_checksums_that_do_not_fit_the_file_are_refused(tmp_path, entry):
    build(tmp_path / "d", [[1, 2], [3]])
    manifest = json.loads((tmp_path / "d.json").read_text())
    manifest["files"][".bin"] |= entry
    (tmp_path / "d.json").write_bytes(manifest_bytes(manifest))
    with pytest.raises(DataError, match=r"d\.json (says files\.\.bin\.|does not have the checksums of all)"):
        IndexedDataset(tmp_path / "d")


def test_an_entry_with_blocks_of_no_bytes_is_refused():
    with pytest.raises(ValueError):
        check_entry({"bytes": 3, "block_bytes": 0, "crc32": ""})
