import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer, OtherTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_build import make, to_jsonl
from test_indexed_dataset import build

from data_utils.build import build_corpus
from data_utils.build_config import BuildConfig
from data_utils.dataset_tools import LengthStatistics, length_statistics, merge_datasets, token_counts
from megatron_lite.errors import DataError


def build_bytes(tmp_path, name, texts, tokenizer=ByteTokenizer):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(to_jsonl(texts))
    build_corpus(BuildConfig(inputs=[str(path)], output=str(tmp_path / name)), tokenizer)
    return str(tmp_path / name)


def test_a_merge_is_what_one_build_makes(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    parts = [build_bytes(tmp_path, "a", texts[:100]), build_bytes(tmp_path, "b", texts[100:])]
    merged = merge_datasets(parts, str(tmp_path / "merged"))
    merged.verify()
    merged.require_tokenizer("bytes-1", 257, 256)
    make(tmp_path, texts)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"out/corpus{suffix}").read_bytes()
    assert [part["num_documents"] for part in merged.manifest["merged"]] == [100, 200]
    assert len(merged.manifest["sources"]) == 2


def test_a_merge_is_refused(tmp_path):
    a, b = build_bytes(tmp_path, "a", ["x"]), build_bytes(tmp_path, "b", ["y"], OtherTokenizer)
    with pytest.raises(DataError, match="different tokenizers"):
        merge_datasets([a, b], str(tmp_path / "c"))
    with pytest.raises(DataError, match="is also an input"):
        merge_datasets([a, a], a, overwrite=True)
    with pytest.raises(DataError, match="already exists"):
        merge_datasets([a, a], b)
    (tmp_path / "b.json").unlink()
    with pytest.raises(DataError, match="has no manifest"):
        merge_datasets([a, b], str(tmp_path / "c"))
    assert not list(tmp_path.glob("c*"))


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
    with pytest.raises(DataError, match="cannot be written"):
        length_statistics(dataset).save_histogram(tmp_path / "missing/h.png", "title")
