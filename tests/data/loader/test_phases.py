"""One stream per corpus over all phases: no window comes twice in an epoch and none is left out, whatever changes."""

import pickle
import random

import numpy as np
import pytest

from data_utils.common.errors import ConfigError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader import corpus_streams as streams
from data_utils.loader import mixture as mixture_module
from data_utils.loader.config import CorpusConfig, DataConfig, PhaseSamples
from data_utils.loader.loader import phase_mixtures
from data_utils.loader.mixture import Mixture, Start, samples_of_corpora
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.interface import DOCUMENT_OVERHEAD


class Corpus:
    """An index of windows without text."""

    prefix = "corpus"

    def __init__(self, num_windows):
        self.manifest = {"tokenizer": {"fingerprint": "x"}, "eos": 1}
        self.num_windows, self.dataset = num_windows, self


def mixtures(indexes, phases, seed):
    """A mixture for each phase, [(samples, weights)]."""
    start, made = Start(), []
    for number, (count, weights) in enumerate(phases, start=1):
        made.append(Mixture(list(zip(indexes, weights, strict=True)), seed, start))
        start = Start(number, start.first_sample + count, made[-1].after(count))
    return made


def located(indexes, phases, seed):
    """Corpus, epoch and window of all samples of the phases, int64 [3, samples]."""
    made = mixtures(indexes, phases, seed)
    each = [
        np.stack(one.locate(np.arange(one.start.first_sample, one.start.first_sample + count)))
        for one, (count, _) in zip(made, phases, strict=True)
    ]
    return np.concatenate(each, axis=1)


def drawn_weights(draw, count):
    """Some corpora have no part: they are added later, removed, or come back."""
    weights = [draw.choice((0, draw.uniform(1, 4))) for _ in range(count)]
    return weights if any(weights) else [1.0] * count


def test_random_plans_have_every_window_once_in_an_epoch(monkeypatch):
    """1,000 plans of up to 6 phases and 4 corpora, in small blocks."""
    monkeypatch.setattr(mixture_module, "BLOCK_SIZE", 16)
    draw = random.Random(5)
    for case in range(1000):
        seed, indexes = (
            draw.randrange(2**40),
            [Corpus(draw.randint(1, 60)) for _ in range(draw.randint(1, 4))],
        )
        phases = [(draw.randint(1, 90), drawn_weights(draw, len(indexes))) for _ in range(draw.randint(1, 6))]
        corpora, epochs, windows = located(indexes, phases, seed)
        for number, index in enumerate(indexes):
            its_epochs, its_windows = epochs[corpora == number], windows[corpora == number]
            assert np.all(np.diff(its_epochs) >= 0), case
            whole = its_epochs.max(initial=0)
            for epoch in range(whole):
                seen = np.sort(its_windows[its_epochs == epoch])
                assert np.array_equal(seen, np.arange(index.num_windows)), case
            last = its_windows[its_epochs == whole]
            assert len(np.unique(last)) == len(last), case
        begin = 0
        for count, weights in phases:
            dealt = np.bincount(corpora[begin : begin + count], minlength=len(weights))
            assert np.all(np.abs(dealt - count * np.array(weights) / sum(weights)) <= 16), case
            assert not np.any(dealt[np.array(weights) == 0]), case
            begin += count


def test_changed_weights_repeat_nothing():
    """With the numbering of one phase, all 12,014 next samples of the first corpus would be repeated."""
    indexes = [Corpus(200_034), Corpus(300_000)]
    phases = [(200_000, (0.9, 0.1)), (40_000, (0.3, 0.7))]
    corpora, epochs, windows = located(indexes, phases, seed=7)
    for number, index in enumerate(indexes):
        positions = (epochs * index.num_windows + windows)[corpora == number]
        assert len(np.unique(positions)) == len(positions)
    assert np.bincount(corpora).tolist() == [191_987, 48_013]


def test_the_first_phase_is_a_run_without_phases():
    indexes = [Corpus(301), Corpus(1777)]
    alone = Mixture(list(zip(indexes, (0.8, 0.2), strict=True)), 1234).locate(np.arange(9000))
    phases = [(9000, (0.8, 0.2)), (10, (0.5, 0.5))]
    assert np.array_equal(located(indexes, phases, 1234)[:, :9000], np.stack(alone))


def test_a_later_edit_leaves_earlier_samples_as_they_are():
    indexes, before = [Corpus(50), Corpus(70)], [(300, (1, 0)), (500, (1, 1)), (400, (1, 3))]
    expected = located(indexes, before, 3)
    indexes.append(Corpus(20))
    shorter = [(300, (1, 0, 0)), (200, (1, 1, 0)), (600, (0, 1, 4))]
    assert np.array_equal(located(indexes, shorter, 3)[:, :500], expected[:, :500])


def test_the_samples_of_a_phase_are_counted_as_they_are_dealt():
    weights = (0.5, 0.3, 0.2)
    made = Mixture([(Corpus(99), weight) for weight in weights], 4, Start(2, 1000, (5, 6, 7)))
    for count in (0, 1, 4096, 9000):
        corpora, _ = made.deal(np.arange(1000, 1000 + count))
        dealt = np.bincount(corpora, minlength=3)
        assert samples_of_corpora(4, weights, count, phase=2).tolist() == dealt.tolist()
        assert made.after(count) == tuple(np.add(dealt, (5, 6, 7)))


@pytest.mark.parametrize("weights", [(0, 0), (1, -1), (1, float("nan"))])
def test_weights_without_meaning_are_refused(weights):
    with pytest.raises(ConfigError, match="numbers >= 0 with a finite sum, at least one of them positive"):
        Mixture([(Corpus(9), weight) for weight in weights], 1)


# Lengths


def corpus_of(prefix, seed):
    """Documents of 1 to 90 tokens; every token is another number, so that it tells its place."""
    lengths = np.random.default_rng(seed).integers(1, 90, 60)
    with IndexedDatasetWriter(prefix, 60000) as writer:
        writer.add(np.arange(lengths.sum()), lengths)
        writer.finish({"eos": 0})
    return IndexedDataset(prefix)


def phase(first_sample, length, weights, region):
    train = tuple(CorpusConfig(prefix=f"{c}", weight=weight) for c, weight in enumerate(weights))
    return PhaseSamples(first_sample, DataConfig(train=train, sequence_length=length, region=region), ())


@pytest.mark.parametrize("region", [0, 64, 500])
def test_every_token_comes_once_in_an_epoch_whatever_changes(tmp_path, monkeypatch, region):
    monkeypatch.setattr(mixture_module, "BLOCK_SIZE", 16)
    monkeypatch.setattr(streams, "_SMALLEST_BLOCK", 8)
    monkeypatch.setattr(streams, "_LARGEST_BLOCK", 8)
    datasets = [corpus_of(tmp_path / name, seed) for seed, name in enumerate("ab")]
    indexes = [WindowIndex(dataset, 32, DOCUMENT_OVERHEAD) for dataset in datasets]
    plan = [(37, 32, (1, 0)), (41, 32, (3, 1)), (29, 64, (1, 1)), (200, 48, (1, 1)), (20, 32, (0, 1))]
    firsts = np.concatenate([[0], np.cumsum([count for count, *_ in plan])])
    phases = [
        phase(int(first), *settings, region) for first, (_, *settings) in zip(firsts, plan, strict=False)
    ]
    mixtures = phase_mixtures(indexes, 5, phases)
    read = [[], []]
    for mixture, first, (count, length, _) in zip(mixtures, firsts, plan, strict=False):
        samples = np.arange(first, first + count)
        mixture = pickle.loads(pickle.dumps(mixture))
        mixture.prefetch(samples)
        tokens, chunk_lengths, chunks = mixture.fetch(samples)
        corpora, _ = mixture.deal(samples)
        assert chunks.min() >= 1 and len(chunks) == count
        row = np.repeat(np.arange(count), chunks)
        assert np.all(np.bincount(row, chunk_lengths) + DOCUMENT_OVERHEAD * (chunks - 1) <= length)
        texts = np.split(tokens, np.cumsum(np.bincount(row, chunk_lengths).astype(int))[:-1])
        for corpus, text in zip(corpora, texts, strict=True):
            read[corpus].append(text)
        single = mixture.fetch(samples[-1:])[0]
        assert np.array_equal(single, texts[-1])  # a sample does not depend on its batch
    for dataset, texts in zip(datasets, read, strict=True):
        every, size = np.concatenate(texts), dataset.num_tokens
        assert len(every) > 2 * size
        for begin in range(0, len(every) - size + 1, size):
            assert np.array_equal(np.sort(every[begin : begin + size]), np.arange(size))
        assert len(np.unique(every[len(every) // size * size :])) == len(every) % size
    epochs = mixtures[-1].epochs(plan[-1][0])
    assert epochs == pytest.approx(
        [sum(map(len, read[c])) / datasets[c].num_tokens for c in (0, 1)], rel=0.05
    )


def test_streams_without_changes_are_windows(tmp_path):
    index = WindowIndex(corpus_of(tmp_path / "a", 1), 32, DOCUMENT_OVERHEAD)
    plain = Mixture([(index, 1.0)], 9)
    samples = np.arange(3 * index.num_windows)
    for expected, found in zip(plain.fetch(samples), plain.as_streams(0).fetch(samples), strict=True):
        assert np.array_equal(expected, found)
