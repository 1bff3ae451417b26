"""Build a token dataset from documents: read, tokenize in parallel, split by content, write safely.

The parent reads blocks of records and writes results; worker processes parse and tokenize. Results are
taken in the order of the input, so the output is byte for byte the same for any number of workers. A
document's split is decided by a keyed hash of its text: the order of the files does not matter, and exact
duplicates never straddle splits.

Memory is bounded: at most IN_FLIGHT_PER_WORKER blocks per worker are under way. Nothing appears under the
final names before the whole input has been read and tokenized without an error.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_utils.documents import (
    DEFAULT_MAX_BAD_RECORDS,
    Block,
    RecordCounts,
    check_options,
    expand_inputs,
    parse_block,
    read_blocks,
)
from data_utils.indexed_dataset import (
    IndexedDatasetWriter,
    existing_files,
    remove_dataset,
    to_token_dtype,
)
from megatron_lite.errors import ConfigError, DataError

IN_FLIGHT_PER_WORKER = 3
_HASH_RANGE = 1 << 64
_SPLIT_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What to build. Raises ConfigError for values out of range."""

    inputs: Sequence[str]  # files and globs
    output: str  # prefix of the dataset's files
    text_key: str = "text"
    text_split: str = "file"  # see documents.TEXT_SPLITS
    split: str = ""  # "train=0.98,validation=0.02"; empty: one dataset under the bare prefix
    split_seed: int = 0  # key of the hash that decides the split
    workers: int = 1  # processes that tokenize; 1: none beside this one
    on_bad_record: str = "error"
    max_bad_records: int = DEFAULT_MAX_BAD_RECORDS
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_options(self.text_split, self.on_bad_record, self.max_bad_records)
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; it must be 1 or more.")
        if not Path(self.output).name or self.output.endswith("/"):
            raise ConfigError(f"output {self.output!r} is no file prefix; give a path such as data/corpus.")
        parse_split(self.split)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Which split a text belongs to."""

    bounds: tuple[int, ...]  # upper ends of the splits in [0, 2^64]
    key: bytes

    def split_of(self, text: str) -> int:
        if len(self.bounds) == 1:
            return 0
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=self.key).digest()
        value = int.from_bytes(digest, "little")
        return next(i for i, bound in enumerate(self.bounds) if value < bound)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The tokens of one block. Documents end with eos."""

    tokens: list[np.ndarray]  # for each split, in the storage dtype
    lengths: list[np.ndarray]  # for each split, int64: tokens of each document, eos included
    counts: RecordCounts
    text_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made, for the summary."""

    documents: dict[str, int]  # prefix -> number
    tokens: dict[str, int]
    counts: RecordCounts
    input_bytes: int
    text_bytes: int
    seconds: float

    def lines(self) -> Iterator[str]:
        speed = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        yield (
            f"{sum(self.documents.values()):,} documents, {sum(self.tokens.values()):,} tokens from "
            f"{self.text_bytes / 1e6:,.1f} MB of text in {self.seconds:,.1f} s ({speed:,.1f} MB/s)"
        )
        for prefix, documents in self.documents.items():
            yield f"  {prefix}: {documents:,} documents, {self.tokens[prefix]:,} tokens"
        if self.counts.empty_documents or self.counts.blank_lines:
            empty, blank = self.counts.empty_documents, self.counts.blank_lines
            yield f"  left out: {empty:,} empty documents, {blank:,} blank lines"
        for kind, count in sorted(self.counts.bad.items()):
            yield f"  skipped: {count:,} bad records of kind {kind}"
        for example in self.counts.examples:
            yield f"    {example}"


def parse_split(text: str) -> dict[str, float]:
    """`train=0.9,test=0.1` as names and fractions; "" is the single split "" (the bare prefix).

    Raises: ConfigError unless the names are distinct and the fractions positive with sum 1.
    """
    if not text:
        return {"": 1.0}
    splits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if not _SPLIT_NAME.fullmatch(name) or name in splits or not 0 < fraction <= 1:
            raise ConfigError(
                f"split part {part!r} must be NAME=FRACTION with a new name (A-Z a-z 0-9 . _ -) and a "
                f"fraction in (0, 1]; for example train=0.98,validation=0.01,test=0.01."
            )
        splits[name] = fraction
    if abs(sum(splits.values()) - 1) > 1e-9:
        raise ConfigError(f"split fractions {text!r} sum to {sum(splits.values()):.6g}; they must sum to 1.")
    return splits


def split_rule(config: BuildConfig) -> SplitRule:
    ends = list(itertools.accumulate(parse_split(config.split).values()))
    bounds = [round(end * _HASH_RANGE) for end in ends[:-1]] + [_HASH_RANGE]
    return SplitRule(tuple(bounds), str(config.split_seed).encode())


def output_prefixes(config: BuildConfig) -> list[str]:
    """The dataset prefix of each split, in order."""
    return [f"{config.output}_{name}" if name else config.output for name in parse_split(config.split)]


def encode_block(block: Block, tokenizer: Any, text_key: str, rule: SplitRule) -> EncodedBlock:
    """Parse and tokenize one block: a pure function, for any process."""
    parsed = parse_block(block, text_key)
    ids, lengths = tokenizer.encode_batch(parsed.texts)
    with_tokens = lengths > 0  # a tokenizer may drop a text whole, for example one of control characters
    parsed.counts.empty_documents += int(len(lengths) - with_tokens.sum())
    splits = np.array([rule.split_of(text) for text in parsed.texts], np.int64)[with_tokens]
    lengths = lengths[with_tokens] + 1
    ids = np.insert(ids, np.cumsum(lengths - 1), tokenizer.special.eos)
    ids = to_token_dtype(ids, tokenizer.vocab_size)
    parts = range(len(rule.bounds))
    return EncodedBlock(
        tokens=[ids[np.repeat(splits == part, lengths)] for part in parts] if len(parts) > 1 else [ids],
        lengths=[lengths[splits == part] for part in parts],
        counts=parsed.counts,
        text_bytes=sum(len(text.encode()) for text in parsed.texts),
        input_bytes=block.input_bytes,
    )


def build_corpus(config: BuildConfig, make_tokenizer: Callable[[], Any]) -> BuildReport:
    """Build the datasets of `config`; see the module docstring.

    Args:
        make_tokenizer: gives an object with `encode_batch`, `special.eos`, `vocab_size`, `fingerprint` and
            `config` (see data_utils/tokenizers.py). Called here and in each worker, so it must pickle.
    Raises: DataError for bad input, a split without documents, output that exists or cannot be written, a
        dead worker.
    """
    started = time.monotonic()
    paths = expand_inputs(config.inputs)
    prefixes = output_prefixes(config)
    _refuse_existing(prefixes, paths, config.overwrite)
    tokenizer = make_tokenizer()
    counts = RecordCounts()
    input_bytes, text_bytes = sum(path.stat().st_size for path in paths), 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, tokenizer.vocab_size)) for prefix in prefixes
        ]
        blocks = stack.enter_context(closing(_encoded_blocks(config, paths, tokenizer, make_tokenizer)))
        for encoded in _with_progress(blocks, input_bytes, writers):
            counts.merge(encoded.counts)
            counts.enforce(config.on_bad_record, config.max_bad_records)
            text_bytes += encoded.text_bytes
            for writer, tokens, lengths in zip(writers, encoded.tokens, encoded.lengths, strict=True):
                writer.add(tokens, lengths)
        _require_documents(writers, counts)
        _commit(writers, list(parse_split(config.split)), _manifest(tokenizer, config, paths, counts))
    return BuildReport(
        documents={str(writer.prefix): writer.num_documents for writer in writers},
        tokens={str(writer.prefix): writer.num_tokens for writer in writers},
        counts=counts,
        input_bytes=input_bytes,
        text_bytes=text_bytes,
        seconds=time.monotonic() - started,
    )


def _refuse_existing(prefixes: Iterable[str], inputs: Iterable[Path], overwrite: bool) -> None:
    existing = [path for prefix in prefixes for path in existing_files(prefix)]
    for path in existing:
        if any(path.samefile(source) for source in inputs):
            raise DataError(f"output {path} is also an input; choose another --output.")
    if existing and not overwrite:
        raise DataError(f"output {existing[0]} already exists; choose another --output or pass --overwrite.")


def _require_documents(writers: Sequence[IndexedDatasetWriter], counts: RecordCounts) -> None:
    total = sum(writer.num_documents for writer in writers)
    if not total:
        raise DataError(
            f"the corpus holds no document with tokens ({counts.empty_documents} empty documents, "
            f"{counts.blank_lines} blank lines, {counts.num_bad} bad records); check the input."
        )
    for writer in writers:
        if not writer.num_documents:
            raise DataError(
                f"split {writer.prefix.name} would receive none of the {total} documents; give it a larger "
                f"fraction or add documents."
            )


def _commit(writers: Sequence[IndexedDatasetWriter], names: Sequence[str], manifest: dict[str, Any]) -> None:
    """Put the splits in place. The old ones go first, all of them: splits of two builds must never mix."""
    for writer in writers:
        writer.seal()
    for writer in writers:
        remove_dataset(writer.prefix)
    for writer, name in zip(writers, names, strict=True):
        writer.finish({**manifest, "split": {**manifest["split"], "name": name or None}})


def _manifest(
    tokenizer: Any, config: BuildConfig, paths: Sequence[Path], counts: RecordCounts
) -> dict[str, Any]:
    """What the writer does not know. No times, no worker count: the same input gives the same manifest."""
    return {
        "split": {"name": None, "rule": config.split or None, "seed": config.split_seed},
        "eos": tokenizer.special.eos,
        "documents_end_with_eos": True,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "config": asdict(tokenizer.config)},
        "sources": [{"path": str(path), "bytes": path.stat().st_size} for path in paths],
        "text_key": config.text_key,
        "text_split": config.text_split,
        "bad_records": dict(sorted(counts.bad.items())),
        "empty_documents": counts.empty_documents,
        "blank_lines": counts.blank_lines,
    }


def _with_progress(
    blocks: Iterable[EncodedBlock], total_bytes: int, writers: Sequence[IndexedDatasetWriter]
) -> Iterator[EncodedBlock]:
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenize", disable=None) as bar:
        for encoded in blocks:
            yield encoded
            bar.update(encoded.input_bytes)
            bar.set_postfix(documents=sum(writer.num_documents for writer in writers), refresh=False)


# ------------------------------------------------------------------------------------------------------------
# Worker processes


def _encoded_blocks(
    config: BuildConfig, paths: Sequence[Path], tokenizer: Any, make_tokenizer: Callable[[], Any]
) -> Generator[EncodedBlock, None, None]:
    """Encode the blocks of the input, in order."""
    blocks = read_blocks(paths, config.text_key, config.text_split)
    rule = split_rule(config)
    if config.workers == 1:
        for block in blocks:
            yield encode_block(block, tokenizer, config.text_key, rule)
        return
    executor = ProcessPoolExecutor(
        config.workers,
        mp_context=multiprocessing.get_context("spawn"),  # fork is unsafe beside the threads of tokenizers
        initializer=_start_worker,
        initargs=(make_tokenizer, config.text_key, rule),
    )
    try:
        yield from _map_in_order(executor, blocks, config.workers * IN_FLIGHT_PER_WORKER)
    except BrokenProcessPool:
        raise DataError(
            "a worker process died (killed for memory?); nothing was written; use fewer --workers."
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _map_in_order(
    executor: ProcessPoolExecutor, blocks: Iterator[Block], max_in_flight: int
) -> Iterator[EncodedBlock]:
    in_flight: deque[Future[EncodedBlock]] = deque()
    for block in blocks:
        in_flight.append(executor.submit(_encode_in_worker, block))
        if len(in_flight) >= max_in_flight:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()


_encode: Callable[[Block], EncodedBlock]  # set once in each worker process, by _start_worker


def _start_worker(make_tokenizer: Callable[[], Any], text_key: str, rule: SplitRule) -> None:
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encode = partial(encode_block, tokenizer=make_tokenizer(), text_key=text_key, rule=rule)


def _exit_with_parent() -> None:
    """A parent killed outright cannot end its workers, and the pool would keep them waiting for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(block: Block) -> EncodedBlock:
    return _encode(block)
