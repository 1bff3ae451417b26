"""Shares of tokens and caps of epochs, against brute force and against the samples that are drawn."""

import itertools
import random

import numpy as np
import pytest

from data_utils.common.errors import ConfigError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader.config import CorpusConfig, DataConfig, PhaseSamples
from data_utils.loader.corpus_report import corpus_report
from data_utils.loader.epoch_caps import share_out
from data_utils.loader.loader import phase_mixtures
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.interface import DOCUMENT_OVERHEAD


class Corpus:
    """An index of windows without text."""

    def __init__(self, num_windows):
        self.manifest = {"tokenizer": {"fingerprint": "x"}, "eos": 1}
        self.num_windows, self.dataset, self.prefix = num_windows, self, f"corpus of {num_windows}"
        self.num_tokens = 10 * num_windows

    def __len__(self):
        return self.num_windows


def brute_force(weights, caps, total):
    """By trying which corpora are capped: the others get one multiple of their weights, within their caps."""
    for capped in itertools.product([False, True], repeat=len(weights)):
        capped = np.array(capped)
        level = (total - caps[capped].sum()) / max(weights[~capped].sum(), 1e-300)
        filled = np.where(capped, caps, level * weights)
        slack = 1e-9 * total
        is_full = abs(filled.sum() - total) < slack and np.all(filled <= caps + slack)
        if is_full and level >= 0 and np.all(level * weights[capped] >= caps[capped] - slack):
            return filled
    return None


def test_a_thousand_mixtures_are_shared_out_as_by_brute_force():
    draw, refused = np.random.default_rng(3), 0
    for _ in range(1000):
        corpora = draw.integers(1, 7)
        weights, windows = draw.uniform(0.01, 1, corpora), draw.integers(1, 1000, corpora).astype(float)
        max_epochs = np.where(draw.random(corpora) < 0.3, 1e9, draw.uniform(0.1, 8, corpora))
        total = float(draw.integers(1, 6000))
        expected = brute_force(weights, max_epochs * windows, total)
        found = share_out((weights / weights.sum() * total)[None], windows[None], max_epochs)
        assert (expected is None) == (found is None)
        if found is None:
            refused += 1
            continue
        assert found[0] == pytest.approx(expected, rel=1e-6, abs=1e-6 * total)
    assert 50 < refused < 500


def test_phases_of_equal_weights_have_equal_shares():
    weights, windows, caps = (
        np.array([0.5, 0.3, 0.2]),
        np.array([100.0, 200.0, 900.0]),
        np.array([2, 4, np.inf]),
    )
    counts = np.array([[700.0], [2100.0], [200.0]])
    whole = share_out(3000 * weights[None], windows[None], caps)[0]
    phases = share_out(counts * weights, np.tile(windows, (3, 1)), caps)
    assert phases == pytest.approx(counts * whole / 3000)


def test_a_phase_of_one_corpus_gets_its_text_before_the_others():
    """2,000 of its 2,500 samples are needed where it is alone, so the phase before has 500 of them."""
    samples = np.array([[1500.0, 1500.0], [2000.0, 0.0]])
    shared = share_out(samples, np.full((2, 2), 1000.0), np.array([2.5, np.inf]))
    assert shared == pytest.approx(np.array([[500.0, 2500.0], [2000.0, 0.0]]), rel=1e-6)
    assert share_out(samples, np.full((2, 2), 1000.0), np.array([1.99, np.inf])) is None


@pytest.mark.parametrize(
    ("samples", "per_epoch", "caps", "expected"),
    [
        # Corpus 0 goes to the second phase, whose other corpus is capped a round later; the first phase has corpus 2.
        ([[9000, 0, 1000], [3500, 500, 0]], [[1000] * 3] * 2, [4.5, 0.5], [[1000, 0, 9000], [3500, 500, 0]]),
        ([[0, 6900, 2100], [4000, 5100, 0]], [[3200, 3400, 700], [1600, 1700, 350]], [4, 2],
         [[0, 1400, 7600], [6400, 2700, 0]]),
    ],
)  # fmt: skip
def test_text_that_suffices_is_found_where_more_is_missing_for_a_while(samples, per_epoch, caps, expected):
    samples, per_epoch = np.array(samples, float), np.array(per_epoch, float)
    shared = share_out(samples, per_epoch, np.array([*caps, np.inf]))
    assert shared == pytest.approx(np.array(expected, float), rel=1e-6)
    assert share_out(samples, per_epoch, np.array([0.77 * caps[0], caps[1], np.inf])) is None


def phases_of(plan, caps, unit="weight", length=512, region=0):
    """Phases of a run: [(samples, weights)], in steps of ten samples."""
    phases, first = [], 0
    for count, weights, *other_length in plan:
        train = tuple(
            CorpusConfig(prefix=f"{number}", max_epochs=cap, **{unit: weight})
            for number, (weight, cap) in enumerate(zip(weights, caps, strict=True))
        )
        data = DataConfig(train=train, sequence_length=(*other_length, length)[0], region=region)
        phases.append(PhaseSamples(first, data, (), first + count, count // 10))
        first += count
    return phases


def counted(mixtures, phases):
    """Samples and epochs of each corpus, by locating every sample; no window comes twice in an epoch."""
    located = [
        np.stack(mixture.locate(np.arange(phase.first_sample, phase.stop_sample)))
        for mixture, phase in zip(mixtures, phases, strict=True)
    ]
    corpora, epochs, windows = np.concatenate(located, axis=1)
    counts = np.bincount(corpora, minlength=len(mixtures[0].indexes))
    for number, index in enumerate(mixtures[0].indexes):
        positions = (epochs * index.num_windows + windows)[corpora == number]
        assert len(np.unique(positions)) == counts[number]
        assert positions.max(initial=0) < -(-counts[number] // index.num_windows) * index.num_windows
    return counts, counts / [index.num_windows for index in mixtures[0].indexes]


def test_no_sample_is_beyond_a_cap_and_what_is_printed_is_what_is_drawn():
    draw, bound, refused = random.Random(8), 0, 0
    for seed in range(150):
        indexes = [Corpus(draw.randint(20, 1500)) for _ in range(draw.randint(1, 4))]
        caps = [draw.choice((None, draw.uniform(0.5, 6))) for _ in indexes]
        caps[draw.randrange(len(indexes))] = None
        plan = [
            (10 * draw.randint(1, 1000), [draw.uniform(0.2, 1) for _ in indexes])
            for _ in range(draw.randint(1, 3))
        ]
        phases = phases_of(plan, caps)
        try:
            mixtures = phase_mixtures(indexes, seed, phases)
        except ConfigError:  # a corpus so small that it gets no sample of a block
            refused += 1
            continue
        counts, epochs = counted(mixtures, phases)
        uncapped = counted(phase_mixtures(indexes, seed, phases_of(plan, [None] * len(caps))), phases)[1]
        lines = list(corpus_report(mixtures, phases[-1].stop_sample, 10))
        for index, count, read, cap, without in zip(indexes, counts, epochs, caps, uncapped, strict=True):
            shown = next(line for line in lines if line.startswith(f"{index.prefix}: "))
            assert f"; {count:,} samples (" in shown
            assert shown.endswith(f"read {read:,.0f} times" if read >= 10 else f"read {read:.3g} times")
            assert cap is None or read <= cap
            if cap is not None and without > cap:
                bound += 1
                # Rounding costs less than a slot of each block.
                slots = sum(-(-samples // 4096) for samples, _ in plan)
                assert count > cap * index.num_windows - slots - len(plan) - 1
    assert bound > 50 and refused < 10


def test_all_text_of_a_short_run_may_be_read():
    """Where the caps leave no choice the numbers are exact: each window as often as its corpus allows."""
    indexes = [Corpus(60), Corpus(90), Corpus(200)]
    phases = phases_of([(60 * 4 + 90 * 2 + 200, (1, 1, 1))], (4, 2, 1))
    counts, epochs = counted(phase_mixtures(indexes, 4, phases), phases)
    assert epochs.tolist() == [4, 2, 1] and counts.sum() == 620
    for sizes, caps, most in (((60, 90, 200), (4, 2, 1), 620), ((68,), (1,), 68), ((68,), (0.5,), 34)):
        indexes, weights = [Corpus(size) for size in sizes], [1] * len(sizes)
        phase_mixtures(indexes, 4, phases_of([(most, weights)], caps))
        with pytest.raises(ConfigError, match="too little text for max_epochs"):
            phase_mixtures(indexes, 4, phases_of([(most + 1, weights)], caps))


@pytest.mark.parametrize("scale", [1, 10])  # within one block, where the numbers are exact, and in several
@pytest.mark.parametrize("plan", [[(3000, (1, 1))], [(1000, (1, 0)), (2000, (1, 2))]])
def test_too_little_text_is_an_error_with_the_steps_that_it_suffices_for(plan, scale):
    indexes, caps = [Corpus(700 * scale), Corpus(400 * scale)], (2, 2)
    plan = [(count * scale, weights) for count, weights in plan]
    with pytest.raises(ConfigError, match=rf"it suffices for ([\d,]+) of the {300 * scale:,} steps") as error:
        phase_mixtures(indexes, 4, phases_of(plan, caps))
    steps = int(str(error.value).partition("suffices for ")[2].split()[0].replace(",", ""))
    assert 218 * scale <= steps <= 220 * scale
    *before, (_, weights) = plan
    shorter = phases_of([*before, (10 * steps - sum(count for count, _ in before), weights)], caps)
    _, epochs = counted(phase_mixtures(indexes, 4, shorter), shorter)
    assert epochs.max() <= 2


def test_a_corpus_of_which_nothing_is_left_is_not_read_and_that_is_said():
    mixtures = phase_mixtures(
        [Corpus(9000), Corpus(3)], 4, phases_of([(20, (1, 0)), (60_000, (1, 1))], (None, 2))
    )
    assert [mixture.quotas.tolist() for mixture in mixtures] == [[4096, 0]] * 2
    assert any(
        line.startswith("warning: corpus of 3 is not read") for line in corpus_report(mixtures, 60_020, 8)
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cap", [None, 2])
@pytest.mark.parametrize("share", [0, 1e308])
@pytest.mark.parametrize("unit", ["weight", "tokens"])
def test_shares_without_a_finite_sum_are_refused(unit, share, cap):
    """By one error, without a warning of numpy before it."""
    phases = phases_of([(3000, (share, share))], (cap, None), unit)
    with pytest.raises(ConfigError, match="finite sum"):
        phase_mixtures([Corpus(700), Corpus(400)], 4, phases)


@pytest.mark.parametrize("unit", ["weight", "tokens"])
def test_a_share_below_a_sample_of_a_block_is_refused_with_the_name_of_the_corpus(unit):
    """The weight in samples that follows from a share of the tokens stands in no file."""
    phases = phases_of([(3000, (0.0001, 1, 0))], (None, None, None), unit)
    message = "corpus of 700 has 0.0001 of the samples, but 1/4096 is the least"
    with pytest.raises(ConfigError, match=message):
        phase_mixtures([Corpus(700), Corpus(400), Corpus(300)], 4, phases)


def test_caps_that_nothing_reaches_change_no_sample():
    indexes, plan = [Corpus(700), Corpus(400)], [(3000, (1, 3)), (2000, (2, 1))]
    free, capped = (phase_mixtures(indexes, 4, phases_of(plan, caps)) for caps in ((None, None), (9, 9)))
    for one, other in zip(free, capped, strict=True):
        samples = np.arange(one.start.first_sample, one.start.first_sample + 2000)
        assert np.array_equal(one.locate(samples), other.locate(samples))


def dataset(prefix, lengths):
    with IndexedDatasetWriter(prefix, 60000) as writer:
        writer.add(np.arange(sum(lengths)) % 60000, np.array(lengths))
        writer.finish({"eos": 0})
    return IndexedDataset(prefix)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Datasets of documents of 3 tokens, and of 100 to 400."""
    directory = tmp_path_factory.mktemp("texts")
    lengths = np.random.default_rng(1).integers(100, 400, 300).tolist()
    return [dataset(directory / "short", [3] * 9000), dataset(directory / "long", lengths)]


def tokens_read(mixtures, phases):
    """Tokens of each corpus that the samples of each phase hold, int64 [phases, corpora]."""
    read = np.zeros((len(phases), 2), np.int64)
    for number, (mixture, phase) in enumerate(zip(mixtures, phases, strict=True)):
        samples = np.arange(phase.first_sample, phase.stop_sample)
        _, lengths, chunks = mixture.fetch(samples)
        of_samples = np.add.reduceat(lengths, np.cumsum(chunks) - chunks)
        read[number] = np.bincount(mixture.deal(samples)[0], of_samples, minlength=2)
    return read


@pytest.mark.parametrize("region", [0, 8192])
def test_shares_of_tokens_are_of_tokens(texts, region):
    """A window of many short documents has fewer tokens: 43 % of the positions here, 98 % in the long documents."""
    phases = phases_of([(8192, (0.3, 0.7), 64), (8192, (1, 1), 128)], (None, None), "tokens", region=region)
    indexes = [WindowIndex(each, 64, DOCUMENT_OVERHEAD) for each in texts]
    read = tokens_read(phase_mixtures(indexes, 4, phases), phases)
    assert read[:, 0] / read.sum(1) == pytest.approx([0.3, 0.5], abs=0.003)


@pytest.mark.parametrize("region", [0, 8192])
def test_caps_hold_where_phases_change_the_length(texts, region):
    indexes = [WindowIndex(each, 64, DOCUMENT_OVERHEAD) for each in texts]
    caps, plan = (2.0, None), [(1500, (1, 1), 64), (1500, (1, 1), 128), (500, (2, 1), 64)]
    free, phases = (phases_of(plan, each, region=region) for each in ((None, None), caps))
    before = tokens_read(phase_mixtures(indexes, 4, free), free).sum(0)[0] / texts[0].num_tokens
    mixtures = phase_mixtures(indexes, 4, phases)
    after = tokens_read(mixtures, phases).sum(0)[0] / texts[0].num_tokens
    assert before > 2.5 and 1.95 < after < 2.005
    assert mixtures[-1].epochs(500)[0] <= 2
