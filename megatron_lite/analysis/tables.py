"""What is measured inside a model, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_lite.analysis.contextuality import Contextuality
from megatron_lite.analysis.heads import Head

SHOWN = 8  # words, the most and the least contextual ones


def contextuality_table(found: Contextuality) -> str:
    """A line for each layer, in brackets words at random; then the most and the least contextual words."""
    names = list(found.measured)
    lines = ["layer  " + "".join(f"{name.replace('_', '-'):>22}" for name in names)]
    for layer in range(len(found.measured[names[0]])):
        cells = [
            f"{float(found.measured[name][layer]):.4f} ({float(found.baseline[name][layer]):.4f})"
            for name in names
        ]
        lines.append(f"{layer:5}  " + "".join(f"{cell:>22}" for cell in cells))
    order = sorted(found.by_word, key=lambda word: float(found.by_word[word][-1]))
    if len(order) > 1:
        lines.append(f"most contextual in the last layer:  {', '.join(order[:SHOWN])}")
        lines.append(f"least contextual:                   {', '.join(order[: -SHOWN - 1 : -1])}")
    return "\n".join(lines)


def by_group(found: Mapping[Head, float]) -> dict[str, list[float]]:
    """Numbers of heads in their order, by group."""
    groups: dict[str, list[float]] = {}
    for head, score in found.items():
        groups.setdefault(head.group, []).append(score)
    return groups


def head_table(title: str, groups: Mapping[str, Sequence[float]], form: str) -> str:
    """A line for each group. Args: form: of a number, as `format` takes it."""
    return "\n".join(
        [
            f"{title}:",
            *(f"  {name:12}" + " ".join(f"{v:{form}}" for v in values) for name, values in groups.items()),
        ]
    )


def attention_table(means: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """A line for each head. Args: means: measure -> [layers][heads]."""
    lines = ["layer head  " + "".join(f"{name:>13}" for name in means)]
    for layer, heads in enumerate(means["entropy"]):
        for head in range(len(heads)):
            lines.append(
                f"{layer:5}{head:5}  " + "".join(f"{means[name][layer][head]:13.3f}" for name in means)
            )
    return "\n".join(lines)
