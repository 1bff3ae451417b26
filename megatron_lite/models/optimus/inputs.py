"""Inputs of scripts/latent.py: settings of sampling, and files of sentences or labels, one a line. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_utils.common.errors import DataError
from data_utils.common.settings import check
from data_utils.common.untrusted import parse_json, read_bounded

MAX_BYTES = 1 << 30  # of a file of sentences, all of which are in memory


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How sentences are sampled in an evaluation. Raises: ConfigError by the option's name."""

    samples: int = 100  # latent vectors of each sentence: k of the bound L_k
    chunk: int = 5  # of them in one forward pass
    batch: int = 16  # sentences in one forward pass
    seed: int = 0  # of the noise

    def __post_init__(self) -> None:
        for name in ("samples", "chunk", "batch"):
            value = getattr(self, name)
            check(value >= 1, f"--{name} is {value}; it must be at least 1.")
        check(
            self.samples % self.chunk == 0,
            f"--samples ({self.samples}) is no multiple of --chunk ({self.chunk}), the samples of one forward pass; "
            "choose a divisor of it.",
        )


def read_lines(path: Path, option: str, holds: str, *, keep_spaces: bool = False) -> list[str]:
    """The lines of a file, without spaces around them unless `keep_spaces`.

    Raises: DataError, also for an empty line, by its number, and for JSON lines, whose braces are no text.
    """
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8-sig")  # without a byte order mark
    except FileNotFoundError as error:
        raise DataError(f"{option} {path}: {error.strerror}; name a file with one {holds} a line.") from None
    except UnicodeDecodeError:
        raise DataError(f"{option} {path} is not UTF-8 text; convert it.") from None
    except ValueError as error:
        raise DataError(f"{option} {path} {error}; name a file with one {holds} a line.") from None
    # Other ends of lines that Unicode knows, such as U+0085, are text.
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []
    if lines and _is_object(lines[0]):
        raise DataError(
            f"{option} {path} holds JSON objects, but a line of it is one {holds}; take the field that holds it: "
            f"jq -r .text {path} > NEW.txt"
        )
    if not lines:
        raise DataError(f"{option} {path} is empty; it needs one {holds} a line.")
    if "" in lines:
        raise DataError(
            f"{option} {path}: line {lines.index('') + 1} is empty; write a {holds}, or remove the line."
        )
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if keep_spaces else lines


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse_json(line.encode()), dict)
    except ValueError:
        return False


def require_labels(labels: Sequence[str], texts: int, per_class: Sequence[int], source: str) -> None:
    """Raises: DataError where a probe cannot learn from the labels and be tested on others.

    Args:
        texts: number of sentences.
        per_class: numbers of labels of each class that are learnt from; none: of each class about 80 %.
        source: of the labels, for messages.
    """
    if len(labels) != texts:
        raise DataError(f"{source} has {len(labels)} labels for {texts} sentences; give one for each line.")
    classes = Counter(labels)
    if len(classes) < 2:
        raise DataError(f"{source} has the class {labels[0]!r} only; a probe needs sentences of two or more.")
    name, smallest = min(classes.items(), key=lambda item: item[1])
    most = max(per_class, default=1)
    if smallest <= most:
        raise DataError(
            f"{source} has {smallest} sentences of class {name!r}; with {most} of each to learn from there must be at "
            f"least {most + 1}: give more, or lower --labels-per-class."
        )
