import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from data_utils.common.errors import ConfigError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader.sampler import WindowIndex, _first_document, derive_key, permute, unpermute

KEYS = st.integers(0, 2**64 - 1).map(np.uint64)


def make_dataset(prefix, lengths, vocab_size=60000):
    """Tokens count up through the dataset, so that a token is its own position."""
    lengths = np.asarray(lengths, np.int64)
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        writer.add(np.arange(lengths.sum()), lengths)
        writer.finish({})
    return IndexedDataset(prefix)


def test_permute_is_a_bijection_for_every_small_n():
    for n in range(1, 2001):
        image = {permute(i, n, np.uint64(12345 + n)) for i in range(n)}
        assert image == set(range(n)), n


@njit
def whole_image(n, key):
    image = np.empty(n, np.int64)
    for i in range(n):
        image[i] = permute(i, n, key)
    return image


@pytest.mark.slow
def test_permute_is_a_bijection_up_to_ten_thousand():
    for n in range(1, 10_001):
        assert np.all(np.bincount(whole_image(n, np.uint64(777 * n)), minlength=n) == 1), n


@given(st.integers(1, 30000), KEYS)
@settings(max_examples=20, deadline=None)
def test_permute_is_a_bijection_for_any_key(n, key):
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


@given(st.integers(2**31, 2**61), KEYS, st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_permute_has_no_collisions_in_large_domains(n, key, start):
    images = [permute((start + i) % n, n, key) for i in range(2000)]
    assert len(set(images)) == len(images)
    assert min(images) >= 0 and max(images) < n


def test_permute_shuffles():
    """Each value lands anywhere equally often over keys: chi-square, 81 degrees of freedom, 7 sigma."""
    n, keys = 10, 5000
    counts = np.zeros((n, n))
    for key in range(keys):
        for i in range(n):
            counts[i, permute(i, n, np.uint64(derive_key(np.uint64(1), 2, key)))] += 1
    expected = keys / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (n - 1) ** 2
    assert abs(chi_square - degrees) < 7 * np.sqrt(2 * degrees)


def test_permute_breaks_up_neighbours():
    """The distance of the images of neighbours is that of random pairs, n / 3 on average, not small."""
    n = 100_000
    image = np.array([permute(i, n, np.uint64(7)) for i in range(20_000)])
    distance = np.abs(np.diff(image)).mean()
    assert 0.95 < distance / (n / 3) < 1.05  # standard error of the mean: 0.5 %


def test_permutation_is_frozen():
    """The order is part of the data format: a change would break the resumption of running trainings."""
    assert [permute(i, 10, np.uint64(0)) for i in range(10)] == FROZEN_PERMUTATION
    assert derive_key(np.uint64(1), 2, 3) == FROZEN_KEY


FROZEN_PERMUTATION = [9, 7, 3, 2, 6, 4, 8, 5, 0, 1]
FROZEN_KEY = 2765949554769063666


def test_keys_differ():
    keys = {
        derive_key(np.uint64(seed), stream, number)
        for seed in range(20)
        for stream in range(20)
        for number in range(20)
    }
    assert len(keys) == 8000


DOCUMENT_LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(DOCUMENT_LENGTHS, st.integers(1, 50), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_windows_cover_every_token_once(tmp_path_factory, lengths, extra, overhead):
    window_length = overhead + extra
    dataset = make_dataset(tmp_path_factory.mktemp("windows") / "d", lengths)
    index = WindowIndex(dataset, window_length, overhead)
    chunks = [index.chunks(window) for window in range(index.num_windows)]

    covered = [token for window in chunks for start, stop in window for token in range(start, stop)]
    assert covered == list(range(dataset.num_tokens))  # once, and in order
    starts = {sum(lengths[:number]) for number in range(len(lengths) + 1)}
    for window in chunks:
        assert len(window) > 0
        cost = 0
        for start, stop in window:
            assert stop > start and not starts & set(range(start + 1, stop))  # within one document
            cost += stop - start + (overhead if start in starts else 0)
        assert (
            cost <= window_length + overhead
        )  # the overhead of the first document may lie in the window before
        assert sum(stop - start for start, stop in window) <= window_length


@given(DOCUMENT_LENGTHS, st.integers(1, 50), st.integers(0, 4), st.lists(st.integers(0, 10**6), max_size=20))
@settings(max_examples=60, deadline=None)
def test_gather_gives_the_tokens_of_the_chunks(tmp_path_factory, lengths, extra, overhead, numbers):
    dataset = make_dataset(tmp_path_factory.mktemp("gather") / "d", lengths)
    index = WindowIndex(dataset, overhead + extra, overhead)
    windows = np.array([number % index.num_windows for number in numbers], np.int64)
    tokens, chunk_lengths, chunks_per_window = index.gather(windows)
    expected = [index.chunks(window) for window in windows]
    assert tokens.dtype == np.int32
    assert chunks_per_window.tolist() == [len(chunks) for chunks in expected]
    assert chunk_lengths.tolist() == [stop - start for chunks in expected for start, stop in chunks]
    assert tokens.tolist() == [
        token for chunks in expected for start, stop in chunks for token in range(start, stop)
    ]


@pytest.mark.parametrize("order", ["mixed", "ascending", "descending", "one long", "many empty"])
def test_the_search_finds_the_last_document_that_begins_before(order):
    """Also where lengths are such that the guess is far off."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 1000, 5000)
    if order in ("ascending", "descending"):
        lengths = np.sort(lengths**3)[:: 1 if order == "ascending" else -1]
    elif order == "one long":
        lengths[1234] = 10**9
    elif order == "many empty":
        lengths[rng.random(len(lengths)) < 0.7] = 0
    ends = np.cumsum(lengths)
    for overhead in (0, 4):
        costs = ends - lengths + overhead * np.arange(len(lengths))
        total = int(ends[-1]) + overhead * len(lengths)
        starts = np.concatenate([[0, total - 1], costs[costs < total], rng.integers(0, total, 3000)])
        found = [_first_document((ends - lengths) * 2, 1, ends[-1], overhead, start) for start in starts]
        assert np.array_equal(found, np.searchsorted(costs, starts, side="right") - 1)


def test_windows_follow_the_definition(tmp_path):
    """Documents of 3, 9 and 2 tokens, overhead 1, windows of 8 costs: hand-made."""
    index = WindowIndex(make_dataset(tmp_path / "d", [3, 9, 2]), 8, 1)
    #  cost   0 1 2 3 | 4 5 6 7 8 ... 13 | 14 15 16
    #  token  - 0 1 2 | - 3 4 5 6 ... 11 |  - 12 13
    assert index.num_windows == 3
    assert [index.chunks(w).tolist() for w in range(3)] == [[[0, 3], [3, 6]], [[6, 12], [12, 13]], [[13, 14]]]


def test_windows_of_a_wide_dtype(tmp_path):
    dataset = make_dataset(tmp_path / "d", [40000, 40000], vocab_size=100_000)
    tokens, _, _ = WindowIndex(dataset, 30000, 0).gather(np.array([2]))
    assert dataset.tokens.dtype == np.int32 and tokens.tolist() == list(range(60000, 80000))


def test_empty_documents_of_a_foreign_dataset(tmp_path):
    index = WindowIndex(make_dataset(tmp_path / "d", [0, 0, 0, 2, 0, 1]), 4, 1)
    assert [index.chunks(w).tolist() for w in range(index.num_windows)] == [[], [[0, 2]], [[2, 3]]]


def test_a_window_index_pickles_without_its_data(tmp_path):
    index = WindowIndex(make_dataset(tmp_path / "d", [30000]), 100)
    data = pickle.dumps(index)
    assert len(data) < 1000
    assert pickle.loads(data).gather(np.array([1]))[0].tolist() == list(range(100, 200))


def test_lengths_are_checked(tmp_path):
    dataset = make_dataset(tmp_path / "d", [3])
    for window_length, overhead in ((0, 0), (2, 2), (5, -1)):
        with pytest.raises(ConfigError, match="window_length"):
            WindowIndex(dataset, window_length, overhead)


@given(DOCUMENT_LENGTHS, st.integers(1, 50), st.integers(0, 4))
@settings(max_examples=30, deadline=None)
def test_prefetch_covers_the_windows(tmp_path_factory, lengths, extra, overhead):
    dataset = make_dataset(tmp_path_factory.mktemp("prefetch") / "d", lengths)
    index = WindowIndex(dataset, overhead + extra, overhead)
    asked = []
    dataset.prefetch = lambda starts, num_tokens: asked.append((starts.tolist(), num_tokens))
    index.prefetch(np.arange(index.num_windows))
    ((starts, num_tokens),) = asked
    for window, start in enumerate(starts):
        chunks = index.chunks(window)
        assert start <= chunks[0, 0] and chunks[-1, 1] <= start + num_tokens


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 4096, 10_001])
@pytest.mark.parametrize("key", [0, 7, 2**64 - 3])
def test_the_permutation_has_an_inverse(n, key):
    key = np.uint64(key)
    assert [unpermute(permute(i, n, key), n, key) for i in range(n)] == list(range(n))


def test_the_inverse_of_a_large_permutation():
    n, key = 10**15 + 37, np.uint64(5)
    for i in (0, 1, 10**9, n - 1):
        assert unpermute(permute(i, n, key), n, key) == i


def test_the_end_of_the_text_in_a_range(tmp_path):
    """Costs: 0 to 3 before the first document, its text 4 to 6; 7 to 10 before the second, its text 11 to 15."""
    index = WindowIndex(make_dataset(tmp_path / "c", [3, 5]), 16, 4)
    ends = {(0, 7): 7, (0, 9): 7, (0, 12): 12, (7, 10): 7, (5, 11): 7, (0, 3): 0, (8, 16): 16}
    assert {(start, stop): index.text_end(start, stop) for start, stop in ends} == ends
