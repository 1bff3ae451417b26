"""Planted bugs in the stream of a corpus whose windows change their length (data_utils/loader/corpus_streams.py)."""

from __future__ import annotations

from support.plants.plant import Plant

STREAMS = tuple(
    Plant(name, "data_utils/loader/corpus_streams.py", old, new, ("tests/data/loader/test_streams.py",))
    for name, old, new in (
        (
            "empty positions before regions not counted in an epoch",
            "self.epoch_cost = cost + self.lead * self.regions",
            "self.epoch_cost = cost",
        ),
        (
            "regions of every epoch in the first one's order",
            "derive_key(self.key(epoch), _REGIONS",
            "derive_key(self.key(0), _REGIONS",
        ),
        (
            "regions in the order of the axis",
            "permute(number, last, key) * self.region",
            "number * self.region",
        ),
        ("the longest region not last", "permute(number, last, key)", "(permute(number, last, key) + 1)"),
        (
            "a leftover that ends without text",
            "text_end = windows.axis.last_text(self.epoch, start, end)",
            "text_end = end",
        ),
        (
            "only one region searched for a leftover's last text",
            "            stop = max(start, begin)\n        return start",
            "            break\n        return start",
        ),
        (
            "an epoch's short last window left out",
            "first, per_epoch = -(-(cost - offset) // self.length)",
            "first, per_epoch = max(1, (cost - offset) // self.length)",
        ),
        (
            "epochs after the second repeat it",
            "return _EpochWindows(epoch + 1 + whole_epochs, 0,",
            "return _EpochWindows(epoch + 1, 0,",
        ),
        (
            "every stretch shuffled alike",
            "return key if self.stretch == begin == 0 else",
            "return key if begin == 0 else",
        ),
        (
            "every block shuffled alike",
            "derive_key(key, self.stretch, begin))",
            "derive_key(key, self.stretch, 0))",
        ),
        (
            "the next stretch begins in the first epoch again",
            "position = windows.epoch * self.axis.epoch_cost + end",
            "position = end",
        ),
        ("unread windows of a block forgotten", "        if stop == count:", "        if stop >= count:"),
        (
            "the last read window in the leftover as well",
            "_Leftover(self, count, stop, missing, short)",
            "_Leftover(self, count - 1, stop, missing, short)",
        ),
        (
            "places after the short window found as before it",
            "position >= self._begin(self.short + 1)",
            "position < 0",
        ),
        (
            "a window of a leftover read from its beginning again",
            "max(start + shift, first), end + shift",
            "first, end + shift",
        ),
        (
            "a leftover's rest begun at its beginning again",
            "position=unread.position + count * self.length",
            "position=count * self.length",
        ),
        (
            "a second leftover begun where the first was",
            "            count = max(0, count - windows)",
            "            count = max(0, count)",
        ),
        (
            "samples of a leftover counted twice",
            "            number -= windows",
            "            number -= windows - 1",
        ),
        (
            "windows of leftovers counted as read",
            "return (after._main.position - positions)",
            "return after._main.position",
        ),
    )
)
