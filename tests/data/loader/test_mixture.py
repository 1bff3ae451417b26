import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.tools import adopt_dataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader.mixture import BLOCK_SIZE, Mixture, batch_indices, quotas
from data_utils.loader.sampler import WindowIndex

WINDOW = 4


def make_index(prefix, num_windows, first_token=0, **manifest):
    """A corpus of `num_windows` windows; the tokens of window w are first_token + w."""
    with IndexedDatasetWriter(prefix, 60000) as writer:
        writer.add(np.repeat(np.arange(num_windows) + first_token, WINDOW), np.array([num_windows * WINDOW]))
        writer.finish(manifest)
    return WindowIndex(IndexedDataset(prefix), WINDOW)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpora")
    return [
        make_index(directory / name, n, first)
        for name, n, first in [("a", 7, 0), ("b", 5000, 100), ("c", 64, 9000)]
    ]


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=8))
@settings(deadline=None)
def test_quotas_are_exact(weights):
    places = quotas(weights)
    assert places.sum() == BLOCK_SIZE
    assert np.all(np.abs(places - np.array(weights) / sum(weights) * BLOCK_SIZE) < 1)


def test_proportions_are_exact_in_every_block(indexes):
    mixture = Mixture(list(zip(indexes, [1, 2, 5], strict=True)), seed=3)
    orders = []
    for block in (0, 1, 1000):
        corpora, _, _ = mixture.locate(np.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE))
        assert np.bincount(corpora).tolist() == [512, 1024, 2560]
        orders.append(corpora.tolist())
    assert orders[0] != orders[1] != orders[2]


def test_each_epoch_visits_every_window_once_in_another_order(indexes):
    mixture = Mixture(list(zip(indexes, [1, 2, 5], strict=True)), seed=3)
    corpora, epochs, windows = mixture.locate(np.arange(10 * BLOCK_SIZE))
    for number, index in enumerate(indexes):
        of_corpus = corpora == number
        assert np.all(np.diff(epochs[of_corpus]) >= 0)  # an epoch ends before the next begins
        visits = [windows[of_corpus & (epochs == epoch)] for epoch in range(epochs[of_corpus].max())]
        assert len(visits) >= 2
        for visit in visits:
            assert sorted(visit.tolist()) == list(range(index.num_windows))
        assert visits[0].tolist() != visits[1].tolist()


def test_seeds_and_corpora_shuffle_differently(tmp_path):
    pair = [(make_index(tmp_path / name, 500), 1.0) for name in "ab"]
    orders = set()
    for seed in (0, 1, -1, 2**64 - 2):
        corpora, _, windows = Mixture(pair, seed).locate(np.arange(1000))
        orders.add(tuple(windows[corpora == 0].tolist()))
        orders.add(tuple(windows[corpora == 1].tolist()))
    assert len(orders) == 8


@given(st.lists(st.integers(0, 10**12), max_size=20), st.integers(0, 2**63))
@settings(max_examples=30, deadline=None)
def test_a_sample_does_not_depend_on_its_batch_or_on_history(indexes, numbers, seed):
    corpora = list(zip(indexes, [3.0, 1.5, 0.25], strict=True))
    together = np.stack(Mixture(corpora, seed).locate(np.array(numbers, np.int64)), axis=1)
    for number, expected in zip(numbers, together, strict=True):
        fresh = np.stack(Mixture(corpora, seed).locate(np.array([number])), axis=1)
        assert fresh[0].tolist() == expected.tolist()


@given(st.lists(st.integers(0, 10**6), max_size=20))
@settings(max_examples=30, deadline=None)
def test_fetch_gives_the_tokens_of_the_located_windows(indexes, numbers):
    mixture = Mixture(list(zip(indexes, [1, 1, 1], strict=True)), seed=0)
    corpora, _, windows = mixture.locate(np.array(numbers, np.int64))
    tokens, chunk_lengths, chunks_per_sample = mixture.fetch(np.array(numbers, np.int64))
    expected = [[0, 100, 9000][corpus] + window for corpus, window in zip(corpora, windows, strict=True)]
    assert tokens.tolist() == np.repeat(expected, WINDOW).tolist()
    assert chunk_lengths.tolist() == [WINDOW] * len(numbers) and chunks_per_sample.tolist() == [1] * len(
        numbers
    )


def test_corpora_may_differ_in_window_length(tmp_path, indexes):
    longer = WindowIndex(indexes[1].dataset, 3 * WINDOW)
    mixture = Mixture([(indexes[0], 1), (longer, 1)], seed=0)
    corpora, _, _ = mixture.locate(np.arange(50))
    _, chunk_lengths, _ = mixture.fetch(np.arange(50))
    assert chunk_lengths.tolist() == [[WINDOW, 3 * WINDOW][corpus] for corpus in corpora]


def test_sampling_order_is_frozen(indexes):
    """The order is part of the data format: a change would break the resumption of running trainings."""
    mixture = Mixture(list(zip(indexes, [1, 2, 1], strict=True)), seed=1)
    assert np.stack(mixture.locate(np.arange(5000, 5006)), axis=1).tolist() == FROZEN_SAMPLES


FROZEN_SAMPLES = [[1, 0, 3766], [1, 0, 4756], [0, 177, 2], [0, 177, 5], [2, 19, 50], [1, 0, 2071]]


def test_a_mixture_pickles(indexes):
    mixture = Mixture([(indexes[0], 1.0), (indexes[1], 2.0)], seed=5)
    copy = pickle.loads(pickle.dumps(mixture))
    assert copy.fetch(np.arange(99))[0].tolist() == mixture.fetch(np.arange(99))[0].tolist()


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], [1e-9, 1], []])
def test_weights_are_checked(indexes, weights):
    with pytest.raises(ConfigError, match=r"corpus weights|the corpus .* of the samples"):
        Mixture(list(zip(indexes, weights, strict=False)), seed=0)


def test_corpora_of_different_tokenizers_do_not_mix(tmp_path):
    a = make_index(tmp_path / "a", 5, tokenizer={"fingerprint": "x"}, eos=1)
    b = make_index(tmp_path / "b", 5, tokenizer={"fingerprint": "y"}, eos=1)
    c = make_index(tmp_path / "c", 5, tokenizer={"fingerprint": "x"}, eos=2)
    (tmp_path / "b2").mkdir()
    foreign = make_index(tmp_path / "b2" / "f", 5)
    (tmp_path / "b2" / "f.json").unlink()
    foreign = WindowIndex(adopt_dataset(tmp_path / "b2" / "f"), WINDOW)
    Mixture([(foreign, 1), (a, 1), (foreign, 1), (a, 1)], seed=0)
    for other in (b, c):
        with pytest.raises(DataError, match="different tokenizers"):
            Mixture([(foreign, 1), (a, 1), (other, 1)], seed=0)


@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(1, 8), st.integers(1, 6))
@settings(deadline=None)
def test_ranks_and_micro_batches_share_the_step_exactly(
    consumed, micro_batch_size, dp_size, num_micro_batches
):
    global_batch_size = micro_batch_size * dp_size * num_micro_batches
    taken = [
        batch_indices(
            consumed,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            dp_rank=rank,
            dp_size=dp_size,
        )
        for rank in range(dp_size)
    ]
    assert all(indices.shape == (num_micro_batches, micro_batch_size) for indices in taken)
    for m in range(num_micro_batches):
        for rank in range(dp_size):
            assert taken[rank][m, 0] == consumed + (m * dp_size + rank) * micro_batch_size
    union = np.sort(np.concatenate([indices.ravel() for indices in taken]))
    assert union.tolist() == list(range(consumed, consumed + global_batch_size))


def test_the_first_micro_batch_of_all_ranks_comes_before_the_second():
    def rank(r):
        return batch_indices(100, global_batch_size=8, micro_batch_size=2, dp_rank=r, dp_size=2).tolist()

    assert rank(0) == [[100, 101], [104, 105]] and rank(1) == [[102, 103], [106, 107]]


def test_batch_sizes_are_checked():
    for global_batch_size in (0, 3, 6):
        with pytest.raises(ConfigError, match="multiple of 4"):
            batch_indices(0, global_batch_size=global_batch_size, micro_batch_size=2, dp_rank=0, dp_size=2)


def check_a_run_that_changes_its_layout(index, segments):
    """Segments: (data-parallel size, micro-batch size, accumulation steps, steps); each resumes the last."""
    mixture = Mixture([(index, 1.0)], seed=3)
    consumed, seen = 0, []
    for dp_size, micro_batch_size, accumulation_steps, steps in segments:
        global_batch_size = dp_size * micro_batch_size * accumulation_steps
        for _ in range(steps):
            for dp_rank in range(dp_size):
                indices = batch_indices(
                    consumed,
                    global_batch_size=global_batch_size,
                    micro_batch_size=micro_batch_size,
                    dp_rank=dp_rank,
                    dp_size=dp_size,
                )
                seen += indices.ravel().tolist()
            consumed += global_batch_size
    assert sorted(seen) == list(range(consumed))
    _, epochs, windows = mixture.locate(np.array(seen))
    visits = np.zeros((epochs.max() + 1, index.num_windows), int)
    np.add.at(visits, (epochs, windows), 1)
    assert np.all(visits[:-1] == 1) and visits[-1].max() == 1  # the last epoch may not be over


SEGMENTS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    min_size=1,
    max_size=5,
)


@given(SEGMENTS)
@settings(max_examples=100, deadline=None)
def test_a_run_that_changes_its_layout_visits_every_window_once(indexes, segments):
    check_a_run_that_changes_its_layout(indexes[2], segments)


@pytest.mark.slow
@given(SEGMENTS)
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_runs_that_change_their_layout(indexes, segments):
    check_a_run_that_changes_its_layout(indexes[2], segments)
