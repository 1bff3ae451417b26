"""Where the length of a sample changes, every position of a corpus still comes exactly once in an epoch."""

import itertools
import random

import numpy as np
import pytest

from data_utils.loader import corpus_streams as streams
from data_utils.loader.corpus_streams import Axis, Stream
from data_utils.loader.sampler import derive_key, permute

SEED = 11


def key(epoch):
    return np.uint64(derive_key(SEED, 1, epoch))


def small_blocks(monkeypatch, smallest, largest):
    monkeypatch.setattr(streams, "_SMALLEST_BLOCK", smallest)
    monkeypatch.setattr(streams, "_LARGEST_BLOCK", largest)


def text_end(start, stop):
    """As if every 7th to 9th position were overhead of a document."""
    while stop > start and stop % 10 in (8, 9, 0):
        stop -= 1
    return stop


def read(axis, stretches):
    """The samples of all stretches, [(samples, length)]: (length, epoch, ranges) of each."""
    stream, samples = None, []
    for number, (count, length) in enumerate(stretches):
        stream = Stream(axis, length) if number == 0 else stream.following(stretches[number - 1][0], length)
        samples += [(length, *stream.sample(ordinal)) for ordinal in range(count)]
    return samples


def check(axis, samples):
    """Each position once in an epoch, whole epochs in order, no empty sample and none with more than its length."""
    cover: dict[int, np.ndarray] = {}
    last = 0
    for length, epoch, ranges in samples:
        assert epoch in (last, last + 1), "epochs come one after another"
        last = epoch
        seen = cover.setdefault(epoch, np.zeros(axis.cost, np.int64))
        assert any(text_end(start, stop) > start for start, stop in ranges), "a sample without text"
        cost = sum(stop - start for start, stop in ranges) + axis.overhead * (len(ranges) - 1)
        assert cost <= length, "a sample that is longer than its row"
        for start, stop in ranges:
            assert 0 <= start < stop <= axis.cost
            seen[start:stop] += 1
    for epoch, seen in cover.items():
        assert seen.max() <= 1, "a position twice in an epoch"
        if epoch < last:
            unseen = np.flatnonzero(seen == 0)
            # Only a document's overhead may end a leftover unread.
            assert all(text_end(place, place + 1) == place for place in unseen), "a hole in an epoch"


def drawn(draw):
    """An axis and stretches, of lengths that leave a text in every row."""
    overhead = draw.choice((0, 1, 3))
    lengths = [draw.randint(3 * overhead + 7, 40) for _ in range(3)]
    longest = max(lengths)
    region = draw.choice((0, longest, longest * draw.randint(1, 4), draw.randint(longest, 150)))
    axis = Axis(draw.randint(5, 500) * 10 + 7, region, overhead, key, text_end)
    return axis, [(draw.randint(0, 120), draw.choice(lengths)) for _ in range(draw.randint(1, 6))]


def run_plans(monkeypatch, count, seed):
    draw = random.Random(seed)
    beyond = changes = 0
    for _ in range(count):
        smallest = draw.choice((1, 3, 8, 32))
        small_blocks(monkeypatch, smallest, smallest * draw.choice((1, 4)))
        axis, stretches = drawn(draw)
        samples = read(axis, stretches)
        check(axis, samples)
        beyond += bool(samples) and samples[-1][1] > 0
        changes += len(stretches) - 1
    return beyond, changes


def test_random_changes_of_length_read_every_position_once(monkeypatch):
    beyond, changes = run_plans(monkeypatch, 1000, seed=7)
    assert beyond > 100 and changes > 2000


def test_epochs_after_random_plans_match_the_samples(monkeypatch):
    """Exactly, but for a document's overhead at the end of a leftover, and leads of regions."""
    draw = random.Random(11)
    for _ in range(300):
        smallest = draw.choice((1, 3, 8, 32))
        small_blocks(monkeypatch, smallest, smallest * draw.choice((1, 4)))
        axis, stretches = drawn(draw)
        positions = sum(stop - start for _, _, ranges in read(axis, stretches) for start, stop in ranges)
        stream = Stream(axis, stretches[0][1])
        for (before, _), (_, length) in itertools.pairwise(stretches):
            stream = stream.following(before, length)
        epochs = stream.epochs(stretches[-1][0])
        assert abs(epochs * axis.cost - positions) <= 3 * len(stretches) + axis.lead * axis.regions


def test_without_regions_and_changes_a_sample_is_a_window_of_today():
    """`Mixture` takes window permute(j % W) of epoch j // W."""
    axis, length = Axis(1234, 0, 4, key), 32
    windows = -(-1234 // length)
    stream = Stream(axis, length)
    for number in range(3 * windows):
        epoch = number // windows
        window = permute(number % windows, windows, key(epoch))
        assert stream.sample(number) == (epoch, [(window * length, min((window + 1) * length, 1234))])


def test_one_region_after_another_in_an_order_of_the_epoch(monkeypatch):
    small_blocks(monkeypatch, 4, 4)
    axis = Axis(10_000, 100, 4, key)
    orders = []
    for epoch in (0, 1):
        ranges = axis.ranges(epoch, 0, axis.epoch_cost)
        assert sorted(ranges) == [(start, start + 100) for start in range(0, 10_000, 100)]
        assert ranges[-1] == (9900, 10_000)
        orders.append(ranges)
    assert orders[0] != orders[1]


def test_unread_windows_of_the_last_block_come_first_in_the_next_stretch(monkeypatch):
    small_blocks(monkeypatch, 8, 8)
    axis = Axis(10_000, 200, 4, key)
    first = Stream(axis, 50)
    unread = [first.sample(number)[1] for number in range(13, 16)]
    following = first.following(13, 3 * 54)
    assert following.sample(0) == (0, [each for ranges in unread for each in ranges])
    assert first.epochs(13) == pytest.approx(13 * 50 / axis.epoch_cost)


def test_nothing_is_left_of_what_ended_with_a_stretch(monkeypatch):
    """A leftover of 162 positions, which two samples of 120 read: two shorter ones would fit beyond it."""
    small_blocks(monkeypatch, 8, 8)
    axis = Axis(10_000, 200, 4, key, text_end)
    check(axis, read(axis, [(13, 50), (2, 120), (500, 32)]))


def test_every_block_of_every_stretch_has_an_order_of_its_own(monkeypatch):
    small_blocks(monkeypatch, 16, 16)
    streams_of_run = [Stream(Axis(10_000, 200, 4, key), 50)]
    for _ in range(2):
        streams_of_run.append(streams_of_run[-1].following(0, 50))
    starts = [[each._main.window(number)[1] for number in range(32)] for each in streams_of_run]
    orders = {tuple(np.argsort(part)) for of_stream in starts for part in (of_stream[:16], of_stream[16:])}
    assert len(orders) == 6


@pytest.mark.parametrize("count", [0, 1, 7, 64, 100, 199, 200, 201, 700])
def test_a_stretch_that_ends_later_begins_with_the_same_samples(monkeypatch, count):
    small_blocks(monkeypatch, 16, 16)
    axis = Axis(6789, 300, 4, key)
    before = read(axis, [(50, 32), (count, 48), (40, 64)])
    after = read(axis, [(50, 32), (count + 9, 48), (5, 32)])
    assert before[: 50 + count] == after[: 50 + count]
