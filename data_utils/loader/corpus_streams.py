"""One stream per corpus over all phases, also where the length of a sample changes: ordinal -> ranges of the corpus.

The axis of a corpus is its documents in order; a position is a token, or one of those that a document costs beside its
tokens (`WindowIndex`). An epoch is the whole axis, cut into regions of `data.region` positions in a keyed order, each
after a few empty positions, since it begins a chunk of its own. Epochs follow each other without end: the stream.

A stretch is the consecutive phases of one length. It cuts the stream into windows from where the stretch before ended,
shuffled within blocks of windows, so that what is read of the stream ends close to one position. Windows of the last
block that are not read when the length changes become a leftover, a stream of its own, which later stretches cut first.
So every position comes exactly once in an epoch, and an epoch ends before the next begins. All of it is closed form:
a lookup costs as much as there are stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from data_utils.loader.sampler import derive_key, permute, unpermute

Ranges = list[tuple[int, int]]  # of the axis, each [start, stop)
_REGIONS = 1 << 62  # key of the order of regions, where that of windows has the number of its stretch
_SMALLEST_BLOCK, _LARGEST_BLOCK, _BLOCKS_OF_EPOCH = 1 << 12, 1 << 20, 64  # windows, or blocks of an epoch


class Axis:
    """The regions of a corpus.

    Args:
        cost: positions.
        region: positions of a region; 0 = one region, without empty positions before it.
        overhead: empty positions before what begins a chunk of its own.
        key: int64 epoch -> uint64, the key of the epoch's order.
        text_end: range -> end of the last text in it; its start if there is none.
    """

    def __init__(
        self,
        cost: int,
        region: int,
        overhead: int,
        key: Callable[[int], np.uint64],
        text_end: Callable[[int, int], int] = lambda start, stop: stop,
    ) -> None:
        # The remainder joins the last region, so no region is shorter than asked for.
        self.regions = max(1, cost // region) if region else 1
        self.region, self.cost, self.overhead = region or cost, cost, overhead
        self.lead = overhead if region else 0
        self.epoch_cost = cost + self.lead * self.regions
        self.has_regions, self.key, self.text_end = region > 0, key, text_end

    def ranges(self, epoch: int, start: int, stop: int) -> Ranges:
        """The positions start to stop - 1 of an epoch's stream on the axis, without the empty ones."""
        ranges = []
        while start < stop:
            begin, end, first = self._region_at(epoch, start)
            end = min(end, stop)
            text = max(start, begin + self.lead)
            if end > text:
                shift = first - begin - self.lead
                ranges.append((text + shift, end + shift))
            start = end
        return ranges

    def _region_at(self, epoch: int, position: int) -> tuple[int, int, int]:
        """Where the region of a position begins and ends in the stream, and where on the axis. The longest is last."""
        last = self.regions - 1
        number = min(position // (self.region + self.lead), last)
        begin = number * (self.region + self.lead)
        if number == last:
            return begin, self.epoch_cost, number * self.region
        # The last region is longer and stays last: all others then begin at multiples of one size, without a table.
        key = np.uint64(derive_key(self.key(epoch), _REGIONS, 0))
        return begin, begin + self.region + self.lead, permute(number, last, key) * self.region

    def last_text(self, epoch: int, start: int, stop: int) -> int:
        """The end of the last text in positions of an epoch's stream; their start if there is none."""
        while start < stop:
            begin, _, first = self._region_at(epoch, stop - 1)
            text = max(start, begin + self.lead)
            shift = first - begin - self.lead
            end = self.text_end(text + shift, stop + shift) - shift if text < stop else text
            if end > text:
                return end
            stop = max(start, begin)
        return start


class _EpochWindows(NamedTuple):
    """The windows of a stretch in one epoch."""

    epoch: int
    offset: int  # of the first window in the epoch
    num_windows: int
    before: int  # windows of the stretch in earlier epochs


@dataclass(frozen=True)
class _Windows:
    """The stream from a position on, in windows of one length, shuffled in blocks that end with the epoch."""

    axis: Axis
    stretch: int
    length: int
    position: int

    def _epoch_windows(self, number: int) -> _EpochWindows:
        cost = self.axis.epoch_cost
        epoch, offset = divmod(self.position, cost)
        # Windows of the epoch that the stretch begins in, and of each whole epoch after it.
        first, per_epoch = -(-(cost - offset) // self.length), -(-cost // self.length)
        if number < first:
            return _EpochWindows(epoch, offset, first, 0)
        whole_epochs = (number - first) // per_epoch
        return _EpochWindows(epoch + 1 + whole_epochs, 0, per_epoch, first + whole_epochs * per_epoch)

    def _block(self, number: int) -> tuple[_EpochWindows, int, int]:
        """The epoch's windows around a window by its ordinal, and the first window and the size of its block there."""
        windows = self._epoch_windows(number)
        # Without regions one block is the whole epoch, the order that plain windows have.
        if not self.axis.has_regions:
            return windows, 0, windows.num_windows
        per_epoch = -(-self.axis.epoch_cost // self.length)
        size = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, per_epoch // _BLOCKS_OF_EPOCH))
        begin = (number - windows.before) // size * size
        return windows, begin, min(size, windows.num_windows - begin)

    def _key(self, epoch: int, begin: int) -> np.uint64:
        # The first block of the first stretch keeps the epoch's own key, so that a run without regions or
        # changes of length has the order of plain windows.
        key = self.axis.key(epoch)
        return key if self.stretch == begin == 0 else np.uint64(derive_key(key, self.stretch, begin))

    def window(self, number: int) -> tuple[int, int, int]:
        """Epoch, start and stop there of a window by its ordinal."""
        windows, begin, size = self._block(number)
        position = permute(number - windows.before - begin, size, self._key(windows.epoch, begin))
        start = windows.offset + (begin + position) * self.length
        return windows.epoch, start, min(start + self.length, self.axis.epoch_cost)

    def left_after(self, count: int) -> tuple[int, _Leftover | None]:
        """After `count` windows: the position after the block begun last, and its windows that are not read."""
        if count == 0:
            return self.position, None
        windows, begin, size = self._block(count - 1)
        end = min(windows.offset + (begin + size) * self.length, self.axis.epoch_cost)
        position = windows.epoch * self.axis.epoch_cost + end
        stop = windows.before + begin + size
        if stop == count:
            return position, None
        # The last window of an epoch may be shorter. If it is unread, the leftover must know which of its
        # windows it is.
        missing = windows.offset + (begin + size) * self.length - end
        short = stop  # ordinal of the shorter window, if it is not read
        if missing:
            short = windows.before + begin + unpermute(size - 1, size, self._key(windows.epoch, begin))
        return position, _Leftover(self, count, stop, missing, short)


class _Leftover:
    """The windows first to stop - 1 of a stretch, one after another, each after empty positions: a stream of one epoch.

    Args: missing: what the window `short` is shorter than the others.
    """

    def __init__(self, windows: _Windows, first: int, stop: int, missing: int, short: int) -> None:
        self.windows, self.first, self.missing = windows, first, missing
        self.windows_left = stop - first
        self.short = short - first if first <= short < stop else stop - first
        self.overhead = windows.axis.overhead
        self.epoch, start, end = windows.window(stop - 1)
        # The leftover ends with text: a sample cut from its end would else be empty.
        text_end = windows.axis.last_text(self.epoch, start, end)
        self.cost = self._begin(stop - 1 - first) + self.overhead + text_end - start

    def unread(self, position: int) -> int:
        """Positions of the corpus's stream from `position` of this stream on: without the empty ones in between."""
        number = self._window_at(position)
        windows_after = self.windows_left - 1 - number
        empty = self.overhead * windows_after + max(0, self._begin(number) + self.overhead - position)
        return self.cost - position - empty

    def _window_at(self, position: int) -> int:
        if position >= self._begin(self.short + 1):
            position += self.missing  # as if the short window were as long as the others
        return position // (self.windows.length + self.overhead)

    def _begin(self, number: int) -> int:
        return number * (self.windows.length + self.overhead) - self.missing * (number > self.short)

    def ranges(self, start: int, stop: int) -> Ranges:
        """Positions of this stream on the axis."""
        ranges: Ranges = []
        stop, number = min(stop, self.cost), self._window_at(start)
        while start < stop:
            begin, end = self._begin(number), min(stop, self._begin(number + 1))
            epoch, first, _ = self.windows.window(self.first + number)
            shift = first - begin - self.overhead
            if end + shift > first:
                ranges += self.windows.axis.ranges(epoch, max(start + shift, first), end + shift)
            start, number = end, number + 1
        return ranges


@dataclass(frozen=True)
class _Unread:
    """A leftover from the first position on that is not read."""

    leftover: _Leftover
    position: int = 0

    def windows(self, length: int) -> int:
        return -(-(self.leftover.cost - self.position) // length)


class Stream:
    """A corpus in a stretch.

    Args:
        stretch: its number. length: positions of a sample, 32 or more where lengths change.
        position: of the stream, from which it cuts windows after the leftovers of earlier stretches.
    """

    def __init__(
        self, axis: Axis, length: int, stretch: int = 0, position: int = 0, leftovers: Sequence[_Unread] = ()
    ) -> None:
        self.axis, self.length, self._leftovers = axis, length, list(leftovers)
        self._main = _Windows(axis, stretch, length, position)

    def sample(self, number: int) -> tuple[int, Ranges]:
        """Epoch and ranges of the axis of a sample by its ordinal in the stretch."""
        for unread in self._leftovers:
            windows = unread.windows(self.length)
            if number < windows:
                start = unread.position + number * self.length
                return unread.leftover.epoch, unread.leftover.ranges(start, start + self.length)
            number -= windows
        epoch, start, stop = self._main.window(number)
        return epoch, self.axis.ranges(epoch, start, stop)

    def following(self, count: int, length: int) -> Stream:
        """The next stretch, after `count` samples of this one."""
        leftovers = []
        for unread in self._leftovers:
            windows = unread.windows(self.length)
            if count < windows:
                leftovers.append(replace(unread, position=unread.position + count * self.length))
            count = max(0, count - windows)
        position, leftover = self._main.left_after(count)
        if leftover is not None:
            leftovers.append(_Unread(leftover))
        return Stream(self.axis, length, self._main.stretch + 1, position, leftovers)

    def epochs(self, count: int) -> float:
        """How often the corpus was read after `count` samples of this stretch, earlier stretches included."""
        after = self.following(count, self.length)
        positions = sum(unread.leftover.unread(unread.position) for unread in after._leftovers)
        return (after._main.position - positions) / self.axis.epoch_cost
