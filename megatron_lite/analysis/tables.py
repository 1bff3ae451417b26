"""The measures of this package as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_lite.analysis.contextuality import Contextuality
from megatron_lite.analysis.heads import Head

SHOWN = 8  # number of most, and of least, contextual words


def contextuality_table(result: Contextuality) -> str:
    """A line for each layer, with random words in brackets; then the most and the least contextual words."""
    names = list(result.measured)
    lines = ["layer  " + "".join(f"{name.replace('_', '-'):>22}" for name in names)]
    for layer in range(len(result.measured[names[0]])):
        cells = [
            f"{float(result.measured[name][layer]):.4f} ({float(result.baseline[name][layer]):.4f})"
            for name in names
        ]
        lines.append(f"{layer:5}  " + "".join(f"{cell:>22}" for cell in cells))
    order = sorted(result.by_word, key=lambda word: float(result.by_word[word][-1]))
    if len(order) > 1:
        lines.append(f"most contextual in the last layer:  {', '.join(order[:SHOWN])}")
        lines.append(f"least contextual:                   {', '.join(order[: -SHOWN - 1 : -1])}")
    return "\n".join(lines)


def by_group(scores: Mapping[Head, float]) -> dict[str, list[float]]:
    """Group -> the scores of its heads, in the order of `scores`."""
    groups: dict[str, list[float]] = {}
    for head, score in scores.items():
        groups.setdefault(head.group, []).append(score)
    return groups


def head_table(title: str, groups: Mapping[str, Sequence[float]], format_spec: str) -> str:
    """A line for each group. Args: format_spec: of each number."""
    lines = [
        f"  {name:12}" + " ".join(f"{v:{format_spec}}" for v in values) for name, values in groups.items()
    ]
    return "\n".join([f"{title}:", *lines])


def attention_table(means: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """A line for each head. Args: means: statistic -> [layers][heads]."""
    lines = ["layer head  " + "".join(f"{name:>13}" for name in means)]
    for layer, heads in enumerate(means["entropy"]):
        for head in range(len(heads)):
            lines.append(
                f"{layer:5}{head:5}  " + "".join(f"{means[name][layer][head]:13.3f}" for name in means)
            )
    return "\n".join(lines)
