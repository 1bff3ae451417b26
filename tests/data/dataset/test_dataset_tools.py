import shutil
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crash_shim import at_every_operation, fill_disk, record_and_kill
from support.data.byte_tokenizer import ByteTokenizer, OtherTokenizer
from support.data.corpora import build, make, to_jsonl

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.checksums import identity
from data_utils.common.errors import DataError, run_command
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.tools import (
    LengthStatistics,
    adopt_dataset,
    length_statistics,
    merge_datasets,
    token_counts,
)
from data_utils.dataset.verification import verify


def build_bytes(tmp_path, name, texts, tokenizer=ByteTokenizer):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(to_jsonl(texts))
    build_corpus(BuildConfig(inputs=[str(path)], output=str(tmp_path / name)), tokenizer)
    return str(tmp_path / name)


def test_a_merge_is_what_one_build_makes(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    parts = [build_bytes(tmp_path, "a", texts[:100]), build_bytes(tmp_path, "b", texts[100:])]
    merged = merge_datasets(parts, str(tmp_path / "merged"))
    verify(merged)
    merged.require_tokenizer("bytes-1", 257, 256)
    make(tmp_path, texts)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"out/corpus{suffix}").read_bytes()
    assert [part["num_documents"] for part in merged.manifest["merged"]] == [100, 200]
    assert len(merged.manifest["sources"]) == 2


def as_files(directory, stem):
    return {path.name: path.read_bytes() for path in directory.glob(f"{stem}*")}


@pytest.mark.parametrize(
    ("overwrite", "change"),
    [
        (False, record_and_kill),
        pytest.param(True, fill_disk, marks=pytest.mark.slow),
        pytest.param(False, fill_disk, marks=pytest.mark.slow),
        pytest.param(True, record_and_kill, marks=pytest.mark.slow),
    ],
)
def test_a_merge_that_is_killed_or_finds_the_disk_full_is_done_by_the_same_command(
    tmp_path, change, overwrite
):
    parts = [build_bytes(tmp_path, name, [f"{name} {i}" for i in range(20)]) for name in "ab"]
    merge_datasets(parts, str(tmp_path / "merged"))
    whole = as_files(tmp_path, "merged")
    output = tmp_path / "out/merged"

    def merge():
        run_command(lambda: merge_datasets(parts, str(output), overwrite) and None)

    def before():
        shutil.rmtree(output.parent, ignore_errors=True)
        if overwrite:
            build(output, [[1, 2]])
        return tmp_path / "journal"

    def after(status, err):
        if change is fill_disk:
            assert status == 2 and err.count("error: ") == 1 and "No space left on device" in err, err
            assert "Traceback" not in err
        else:
            assert status == -signal.SIGKILL
        if overwrite or not (output.parent / "merged.json").exists():
            merge_datasets(parts, str(output), overwrite)
        assert as_files(output.parent, "merged") == whole == as_files(output.parent, "")

    assert at_every_operation(change, merge, before, after) > 12


@pytest.mark.parametrize("change", [pytest.param(record_and_kill, marks=pytest.mark.slow), fill_disk])
def test_an_adoption_that_is_killed_or_finds_the_disk_full_is_done_by_the_same_command(tmp_path, change):
    build(tmp_path / "d", [[1, 2], [3]])
    (tmp_path / "d.json").unlink()
    origin = as_files(tmp_path, "d")
    directory = tmp_path / "adopted"
    prefix = directory / "d"

    def before():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for name, content in origin.items():
            (directory / name).write_bytes(content)
        return tmp_path / "journal"

    def after(status, err):
        assert status == (2 if change is fill_disk else -signal.SIGKILL), err
        assert "Traceback" not in err
        if not (directory / "d.json").exists():
            adopt_dataset(str(prefix))
            assert sorted(as_files(directory, "")) == ["d.bin", "d.idx", "d.json"]
        verify(IndexedDataset(prefix))

    assert (
        at_every_operation(
            change, lambda: run_command(lambda: adopt_dataset(str(prefix)) and None), before, after
        )
        > 3
    )


def test_a_merge_is_refused(tmp_path):
    a, b = build_bytes(tmp_path, "a", ["x"]), build_bytes(tmp_path, "b", ["y"], OtherTokenizer)
    with pytest.raises(DataError, match="different tokenizers"):
        merge_datasets([a, b], str(tmp_path / "c"))
    with pytest.raises(DataError, match="is also an input"):
        merge_datasets([a, a], a, overwrite=True)
    with pytest.raises(DataError, match="already exists"):
        merge_datasets([a, a], b)
    (tmp_path / "b.json").unlink()
    adopt_dataset(b)
    with pytest.raises(DataError, match="was adopted, so its tokenizer is unknown"):
        merge_datasets([a, b], str(tmp_path / "c"))
    assert not list(tmp_path.glob("c*"))


def test_the_identity_of_a_dataset_stays(tmp_path):
    """As version 2 gave it for these bytes: a run that is resumed must not take them for others."""
    dataset = build(tmp_path / "d", [[1, 2, 3], [258]])
    expected = "0073319a5d70b4efa04a45f1eef1061b9721cb00e402e079704bb32d7ce0cf5b"
    assert identity(dataset.manifest["files"][".bin"]) == expected


@given(st.lists(st.integers(1, 50), min_size=1), st.sampled_from([1, 25, 50, 99, 100]))
@settings(deadline=None)
def test_length_statistics(lengths, percent):
    statistics = LengthStatistics(np.bincount(lengths))
    expected = np.percentile(lengths, percent, method="inverted_cdf")
    assert statistics.percentile(percent) == expected
    assert statistics.mean == pytest.approx(np.mean(lengths), rel=1e-12)  # float64 sums of small integers


def test_counts_of_a_dataset(tmp_path):
    dataset = build(tmp_path / "d", [[1, 2, 3], [7], [7, 7, 1]])
    assert length_statistics(dataset).counts.tolist() == [0, 1, 0, 2]
    assert token_counts(dataset).tolist() == [0, 2, 1, 1, 0, 0, 0, 3]


def test_the_histogram_is_a_picture(tmp_path):
    dataset = build(tmp_path / "d", [[1] * n for n in range(1, 50)])
    length_statistics(dataset).save_histogram(tmp_path / "h.png", "title")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    length_statistics(dataset).save_histogram(tmp_path / "new/h.svg", "title")
    assert "<svg" in (tmp_path / "new/h.svg").read_text()
    with pytest.raises(DataError, match=r"--histogram .*h\.png"):
        length_statistics(dataset).save_histogram(tmp_path / "h.png/h.png", "title")
