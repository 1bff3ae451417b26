"""Files of strangers: limits, strict JSON, types."""

import os
from typing import Annotated

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.untrusted import MAX_DEPTH, conform, parse_json, read_bounded


class Entry(TypedDict):
    bytes: Annotated[int, Field(ge=0)]
    shape: list[int]


def test_regular_files_of_limited_size(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_bounded(path, 4)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "absent", 4)


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(kind, tmp_path):
    """Opened plainly, a FIFO would wait for ever and /dev/zero never end."""
    path = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="symbolic links" if kind == "loop" else "not a regular file"):
        read_bounded(path, 100)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}', b"[NaN]", b"-Infinity", b"1" * 5000, b""],
)
def test_damaged_json(content):
    with pytest.raises(ValueError) as caught:
        parse_json(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_depth():
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(ValueError, match=f"{MAX_DEPTH} levels"):
        parse_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "value, message",
    [
        ({"x": {"bytes": -1, "shape": []}}, r"says x\.bytes -1; it must be greater than or equal to 0"),
        ({"x": {"bytes": True, "shape": []}}, r"says x\.bytes True; it must be a valid integer"),
        ({"x": {"bytes": 2.0, "shape": []}}, r"says x\.bytes 2\.0; it must be a valid integer"),
        ({"x": {"bytes": 2, "shape": [1, "2"]}}, r"says x\.shape\[1\] '2'; it must be a valid integer"),
        ({"x": {"bytes": 2}}, r"has no x\.shape"),
        ([], r"says in all \[\]; it must be a valid dictionary"),
        ({"x" * 5000: 1}, r"^says x+ \.\.\. x+ 1; it must be a valid dictionary$"),
    ],
)
def test_types_are_strict(value, message):
    with pytest.raises(ValueError, match=message):
        conform(value, dict[str, Entry])


def test_what_conforms_comes_back():
    assert conform({"x": {"bytes": 2, "shape": [1], "other": 0}}, dict[str, Entry]) == {
        "x": {"bytes": 2, "shape": [1]}
    }
