"""Text pairs of a build: a query, a text that belongs to it, and texts that do not, of the fields of records.

A record of the dataset is 2 + negatives consecutive documents: query, positive, negatives. So record i is documents
(2 + negatives) i to (2 + negatives) (i + 1) - 1, and needs no index of its own. A record with fewer negatives has empty
documents at its end; of one with more, the last are left out and counted. One with several positives becomes several
records. Labelled pairs (labelled_pairs.py), whose two texts are one document with a class, are something else.

A prompt stands before a text before both become tokens. Beside each document is a hash of its text, without the prompt,
by which equal texts of a batch are found; beside each record its score, if the input has scores. Texts have no eos.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import listed, shown
from data_utils.corpus.documents import FileRange, RecordBlock, RecordCounts, parsed_records, read_blocks
from data_utils.corpus.inputs import file_format
from data_utils.corpus.json_records import UnusableRecord, field_at, json_type, parse_json_object
from data_utils.corpus.stored_files import InputFile

# Names of columns that are found by themselves, as data sets for sentence-transformers and FlagEmbedding have them.
_COMMON_NAMES = {
    "query": ("query", "anchor", "question", "sentence1"),
    "positive": ("positive", "positives", "pos", "document", "answer", "sentence2"),
    "score": ("score",),
}
_NEGATIVE = re.compile(r"(?:negatives?|neg)(?:_(\d+))?")
_FIRST_RECORDS = 100  # that say the columns and the number of negatives
READ, MISSING, CUT = "records", "missing_negatives", "cut_negatives"  # what is counted


class TextPair(NamedTuple):
    texts: list[str]  # query, positive, negatives; without prompts
    score: float


@dataclass(frozen=True)
class TextPairReader:
    """Reads the text pairs of records. Each process has one.

    Args: prompts: before the query, and before the other texts; prompt_tokens: their tokens.
    """

    query: str  # columns
    positive: str
    negative: tuple[str, ...]
    score: str | None
    negatives: int
    prompts: tuple[str, str]
    prompt_tokens: tuple[int, int]

    @property
    def columns(self) -> tuple[str, ...]:
        """Without repetition: a query may be its own positive."""
        score = [] if self.score is None else [self.score]
        return tuple(dict.fromkeys((self.query, self.positive, *self.negative, *score)))

    @property
    def per_record(self) -> int:
        return 2 + self.negatives

    def entry(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """The entry `text_pairs` of a manifest. Args: counts: READ and others."""
        columns = {"query": self.query, "positive": self.positive, "negatives": list(self.negative)}
        sides = zip(("query", "document"), self.prompts, self.prompt_tokens, strict=True)
        return {
            "columns": {**columns, "score": self.score},
            "negatives": self.negatives,
            "prompts": {side: {"text": text, "tokens": tokens} for side, text, tokens in sides},
            "counts": {name: counts.get(name, 0) for name in (READ, MISSING, CUT)},
        }

    def plan(self) -> dict[str, Any]:
        """What the shards of a build depend on."""
        return asdict(self)

    def pairs(self, record: bytes | UnusableRecord) -> list[TextPair] | None:
        """The pairs of a record, with all of its negatives; none if a text is empty; None for a blank line.

        Raises: UnusableRecord.
        """
        if isinstance(record, UnusableRecord):
            raise record
        if not record or record.isspace():
            return None
        tree = parse_json_object(record)
        queries, positives = (texts_of(tree, name, True) for name in (self.query, self.positive))
        negatives = [text for name in self.negative for text in texts_of(tree, name, False)]
        score = 0.0 if self.score is None else self._score(tree)
        if len(queries) > 1:
            raise UnusableRecord(
                "several_queries", f"field {self.query!r} holds {len(queries)} texts, not one"
            )
        return [TextPair([query, text, *negatives], score) for query in queries for text in positives]

    def _score(self, tree: Mapping[str, Any]) -> float:
        value = tree.get(self.score or "")
        try:
            score = math.nan if isinstance(value, bool) or value is None else float(np.float32(float(value)))
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            raise UnusableRecord("bad_score", f"the score in {self.score!r} is {shown(value)}, not a number")
        return score


def texts_of(tree: Mapping[str, Any], name: str, is_required: bool) -> list[str]:
    """The texts of a field that are not empty. Raises UnusableRecord."""
    try:
        value = field_at(tree, name)
    except KeyError:
        if not is_required:
            return []
        problem = f"there is no field {name!r} (fields: {listed(list(tree)[:10]) or 'none'})"
        raise UnusableRecord("missing_field", problem) from None
    texts = value if isinstance(value, list) else [] if value is None and not is_required else [value]
    for text in texts:
        if not isinstance(text, str):
            raise UnusableRecord("field_not_text", f"field {name!r} holds {json_type(text)}, not text")
    return [text for text in texts if text and not text.isspace()]


class EncodedPairs(NamedTuple):
    """The text pairs of a block; per_record documents for each of n records."""

    ids: np.ndarray  # int32 [all tokens]
    lengths: np.ndarray  # int64 [n per_record], 0 where a record has no further negative
    text_hashes: np.ndarray  # uint64 [n per_record], 0 where the length is
    scores: np.ndarray  # fp32 [n]
    texts: list[str]  # [n per_record]
    lines: list[int]  # [n per_record]
    counts: RecordCounts


def encode_text_pairs(block: RecordBlock, tokenizer: Any, reader: TextPairReader) -> EncodedPairs:
    """Parse and tokenize the text pairs of a block: a pure function, for any process."""
    counts, pairs, lines = RecordCounts(), [], []
    for line, found in parsed_records(block, reader.pairs, counts):
        counts.empty_documents += not found
        pairs += found
        lines += [line] * len(found)
    size = reader.per_record
    texts = [text for pair in pairs for text in (pair.texts + [""] * reader.negatives)[:size]]
    sides = itertools.cycle([reader.prompts[0], *[reader.prompts[1]] * (size - 1)])
    prompted = [prompt + text if text else "" for prompt, text in zip(sides, texts, strict=False)]
    ids, lengths = tokenizer.encode_batch(prompted)
    lengths = lengths.reshape(-1, size)
    is_whole = lengths[:, :2].all(axis=1)  # a tokenizer may drop all of a text (control characters)
    counts.empty_documents += int((~is_whole).sum())
    ids = ids[np.repeat(is_whole, lengths.sum(axis=1))]
    pairs = list(itertools.compress(pairs, is_whole))
    lengths = lengths[is_whole].ravel()
    of_documents = np.repeat(is_whole, size)
    texts = list(itertools.compress(texts, of_documents))
    given = [len(pair.texts) - 2 for pair in pairs]
    counts.mentions = {
        READ: len(pairs),
        MISSING: sum(max(0, reader.negatives - number) for number in given),
        CUT: sum(max(0, number - reader.negatives) for number in given),
    }
    return EncodedPairs(
        ids,
        lengths,
        np.where(lengths > 0, text_hashes(texts), np.uint64(0)),
        np.array([pair.score for pair in pairs], np.float32),
        texts,
        np.repeat(lines, size)[of_documents].tolist(),
        counts,
    )


def text_hashes(texts: Iterable[str]) -> np.ndarray:
    """A hash of each text, uint64; never 0, which says that there is no text."""
    digests = b"".join(
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in texts
    )
    return np.maximum(np.frombuffer(digests, "<u8"), np.uint64(1))


def open_text_pairs(
    config: BuildConfig,
    inputs: Sequence[InputFile],
    encode: Callable[[list[str]], tuple[np.ndarray, np.ndarray]],
) -> TextPairReader | None:
    """The reader of a build of text pairs; None: it builds no text pairs. Args: encode: of the tokenizer, in a batch.

    Raises: ConfigError for columns that are not there or cannot be told, or inputs without columns.
    """
    if not config.text_pairs:
        return None
    for source in inputs:
        if file_format(source, "") == "":
            raise ConfigError(
                f"--text-pairs needs JSON lines or tables, but {source} is text without fields; convert it."
            )
    records = list(itertools.islice(objects_of(inputs, True), _FIRST_RECORDS))
    fields = list(dict.fromkeys(name for record in records for name in record))
    negative = tuple(config.negative_columns) or tuple(_negative_columns(fields))
    query, positive = (
        getattr(config, f"{role}_column") or only_column(role, fields) for role in ("query", "positive")
    )
    score = config.score_column or next((name for name in _COMMON_NAMES["score"] if name in fields), None)
    prompts = config.query_prompt, config.document_prompt
    prompt_tokens = tuple(encode(list(prompts))[1].tolist())
    reader = TextPairReader(query, positive, negative, score, 0, prompts, prompt_tokens)
    required = 1 if query == positive else 2  # the same text twice (SimCSE)
    if len(reader.columns) < required + len(negative) + (score is not None):
        raise ConfigError(
            f"the columns {', '.join(reader.columns)} of text pairs have several roles; only query and positive may be "
            "one column."
        )
    negatives = config.negatives
    if negatives is None:
        texts = [sum(len(texts_of(tree, name, False)) for name in negative) for tree in records]
        negatives = max(texts, default=0)
    return TextPairReader(query, positive, negative, score, negatives, prompts, prompt_tokens)


def objects_of(inputs: Iterable[InputFile], skips_bad: bool = False) -> Iterator[dict[str, Any]]:
    """The records of files as JSON objects. Raises DataError for a bad record, unless it is skipped; without any."""
    counts, found = RecordCounts(), False
    for path in inputs:
        for block in read_blocks([FileRange(path)], ()):
            trees = [tree for _, tree in parsed_records(block, _tree, counts)]
            if not skips_bad:
                counts.enforce("error", 0, "file")
            yield from trees
            found = found or bool(trees)
    if not found:
        raise DataError(f"the input has no record ({counts.num_bad} bad ones); give one with text pairs.")


def _tree(record: bytes | UnusableRecord) -> dict[str, Any] | None:
    if isinstance(record, UnusableRecord):
        raise record
    return parse_json_object(record) if record and not record.isspace() else None


def only_column(role: str, fields: Sequence[str]) -> str:
    """The column of a role, by the common names. Raises ConfigError without one, or with several."""
    found = [name for name in _COMMON_NAMES[role] if name in fields]
    if len(found) == 1:
        return found[0]
    problem = (
        f"has the columns {' and '.join(found)}"
        if found
        else f"has no column {', '.join(_COMMON_NAMES[role])}"
    )
    raise ConfigError(
        f"the input {problem}, so its {role} column cannot be told; set --{role}-column to one of "
        f"{listed(fields[:20])}."
    )


def _negative_columns(fields: Sequence[str]) -> list[str]:
    """The columns of negatives in the order of their numbers."""
    numbers = {name: match[1] for name in fields if (match := _NEGATIVE.fullmatch(name))}
    return sorted(numbers, key=lambda name: int(numbers[name] or 0))
