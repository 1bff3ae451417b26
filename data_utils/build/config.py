"""The options of a corpus build, and the rule that assigns documents to splits."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from data_utils.common.errors import ConfigError
from data_utils.common.files import require_prefix
from data_utils.common.settings import checked, setting
from data_utils.corpus.documents import DEFAULT_MAX_BAD_RECORDS, TEXT_KEY, check_options
from data_utils.corpus.inputs import file_format
from data_utils.corpus.stored_files import InputFile

DEFAULT_SHARD_BYTES = 16 << 20
_HASH_RANGE = 1 << 64
# Option -> options of which it needs one.
_NEEDS = {
    "split_seed": ("split",),
    "entities_key": ("entity_ids",),
    "entity_ids": ("entities_key",),
    "min_score": ("entities_key", "spans_key"),
    "second_key": ("labels",),
    "labels": ("second_key",),
    **dict.fromkeys(("query_column", "positive_column", "negative_columns", "score_column"), ("text_pairs",)),
    **dict.fromkeys(("query_prompt", "document_prompt", "negatives"), ("text_pairs",)),
}
_SPLIT_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
@checked("")
class BuildConfig:
    """The options of a corpus build. Raises ConfigError for values out of range."""

    inputs: Sequence[str]  # files, globs and URLs
    output: str  # prefix of the dataset's files
    text_key: str = "text"
    text_split: str = "file"  # see documents.TEXT_SPLITS
    split: str = ""  # "train=0.98,validation=0.02"; empty: one dataset under the bare prefix
    split_seed: int = 0  # key of the hash that decides the split
    workers: int = setting(0, "worker processes per rank; 0 = tokenize in the main process", at_least=0)
    on_bad_record: str = "error"
    max_bad_records: int = DEFAULT_MAX_BAD_RECORDS
    deduplicate: bool = False  # keep the first of exactly equal texts
    evaluation_inputs: Sequence[str] = ()  # report documents that share word sequences with these texts
    shard_bytes: int = setting(
        DEFAULT_SHARD_BYTES, "stored input bytes per shard; does not change the output", at_least=1
    )
    entities_key: str | None = None  # field of JSON lines with the entities that a text mentions
    entity_ids: str | None = None  # file that gives each of their names a number
    min_score: float = setting(0.0, "mentions with a lower score are skipped", at_least=0)
    capitals: bool = False  # store which words begin with one, instead of entities
    spans_key: str | None = None  # field of JSON lines with spans without numbers, instead of both
    second_key: str | None = None  # field of JSON lines with the second text of a labelled pair
    labels: str | None = None  # file with the names of their labels
    markers: str | None = None  # file with the markers by which pairs are found in texts
    text_pairs: bool = (
        False  # of JSON lines and tables: a query, a text that belongs to it, and such that do not
    )
    query_column: str | None = None  # None: found by its name, as the next ones
    positive_column: str | None = None
    negative_columns: Sequence[str] = ()
    score_column: str | None = None
    query_prompt: str = ""  # before each query, as part of its text
    document_prompt: str = ""  # before each other text
    negatives: int | None = setting(
        None, "negatives of a record; None = as many as the first have", at_least=0, at_most=1000
    )
    overwrite: bool = False
    restart: bool = False  # discard what a stopped build left

    def __post_init__(self) -> None:
        check_options(self.text_split, self.on_bad_record, self.max_bad_records)
        require_prefix(self.output)
        for name, needed in _NEEDS.items():
            if self._is_given(name) and not any(map(self._is_given, needed)):
                raise ConfigError(
                    f"{_option(name)} is given without {' or '.join(map(_option, needed))}, which it is for; give both "
                    "or neither."
                )
        if self.text_pairs and self.text_key != TEXT_KEY:
            raise ConfigError(
                f"--text-key {self.text_key} is given with --text-pairs, whose texts have columns of their own; set "
                "--query-column and --positive-column instead."
            )
        exclusive = ("text_pairs", "capitals", "spans_key", "entities_key", "second_key", "markers")
        conflicting = [_option(name) for name in exclusive if getattr(self, name)]
        if len(conflicting) > 1:
            raise ConfigError(
                f"{conflicting[0]} is given with {conflicting[1]}, but a dataset stores only one of these; give one "
                "of them."
            )
        parse_split(self.split)

    def _is_given(self, name: str) -> bool:
        return getattr(self, name) not in (getattr(type(self), name), [])


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Assigns each text to a split by its hash."""

    bounds: tuple[int, ...]  # upper ends of the splits in [0, 2^64]
    key: bytes

    def split_index(self, text: str) -> int:
        """The index of a text's split."""
        if len(self.bounds) == 1:
            return 0
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self.key).digest()
        value = int.from_bytes(digest, "little")
        return next(i for i, bound in enumerate(self.bounds) if value < bound)


def parse_split(text: str) -> dict[str, float]:
    """`train=0.9,test=0.1` as names and fractions; "" is the single split "" (the bare prefix).

    Raises: ConfigError unless the names are distinct and the fractions positive with sum 1.
    """
    if not text:
        return {"": 1.0}
    splits: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = entry.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if not _SPLIT_NAME.fullmatch(name) or name in splits or not 0 < fraction <= 1:
            raise ConfigError(
                f"split entry {entry!r} must be NAME=FRACTION with a unique name (A-Z a-z 0-9 . _ -) and a fraction "
                "in (0, 1], for example train=0.98,validation=0.01,test=0.01."
            )
        splits[name] = fraction
    if abs(sum(splits.values()) - 1) > 1e-9:
        raise ConfigError(f"split fractions {text!r} sum to {sum(splits.values()):.6g}; they must sum to 1.")
    return splits


def require_json_lines(option: str, inputs: Sequence[InputFile]) -> None:
    """Raise ConfigError for inputs without fields, which an option reads."""
    for source in inputs:
        if file_format(source, "") != "jsonl":
            raise ConfigError(
                f"{option} needs JSON lines, but {source} is another format; convert it or drop the option."
            )


def split_rule(config: BuildConfig) -> SplitRule:
    ends = list(itertools.accumulate(parse_split(config.split).values()))
    bounds = [round(end * _HASH_RANGE) for end in ends[:-1]] + [_HASH_RANGE]
    return SplitRule(tuple(bounds), str(config.split_seed).encode())


def output_prefixes(config: BuildConfig) -> list[str]:
    """The dataset prefix of each split, in order."""
    return [f"{config.output}_{name}" if name else config.output for name in parse_split(config.split)]
