"""From file parts to finished shards: read, parse, tokenize and write, in this process or in worker processes.

A worker process does all the work of a shard, so only the number of a shard and its small record pass between
processes. Workers share no lock, so nobody waits for a killed worker.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np

from data_utils.build.capitals import Reader
from data_utils.build.config import BuildConfig, SplitRule, parse_split, split_rule
from data_utils.build.contamination import EvaluationTexts
from data_utils.build.mentions import encode_with_entities
from data_utils.build.pairs import PairReader, encode_pairs
from data_utils.build.ranks import Ranks
from data_utils.build.shards import BuildDirectory, ShardWriter
from data_utils.common.errors import DataError
from data_utils.common.memory import return_freed_memory
from data_utils.common.progress import progress_bar
from data_utils.corpus.documents import (
    MAX_EXAMPLES,
    FileRange,
    RecordBlock,
    RecordCounts,
    SourceLocation,
    largest_record,
    parse_block,
    read_blocks,
    with_line_in_file,
)
from data_utils.dataset.writer import to_token_dtype
from data_utils.tokenizers.special_tokens import NO_TOKEN

_POLL_SECONDS = 0.2
# The progress of a shard. The entries of what is being read are 0 before and after.
_FIELDS = ("input bytes", "documents", "process", "file part", "line in it", "bytes of the record")
_DONE, _READING, _RECORD = slice(0, 2), slice(2, 6), slice(4, 6)
_MEMORY_REMEDY = (
    "use fewer --workers, give the job more memory, or split the record. Finished shards are kept; repeat the same "
    "command to continue."
)


@dataclass(frozen=True)
class Job:
    """The job as every rank and worker needs it. Made by rank 0."""

    config: BuildConfig
    shards: list[list[FileRange]]
    todo: list[int]  # numbers of the unfinished shards
    fingerprint: str  # of the tokenizer
    dtype: np.dtype
    input_bytes: int
    evaluation: EvaluationTexts | None
    reader: Reader | None = None

    @property
    def arrays(self) -> list[str]:
        """The names of a shard's arrays."""
        more = {"hashes": self.config.deduplicate, "entities": self.reader is not None}
        return ["tokens", "lengths", *(name for name, has in more.items() if has)]

    @property
    def directory(self) -> BuildDirectory:
        return BuildDirectory(self.config.output)

    @property
    def num_splits(self) -> int:
        return len(parse_split(self.config.split))


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The tokens of one block. Documents end with eos if the vocabulary has one."""

    splits: np.ndarray  # int64 [documents]: number of the split
    tokens: np.ndarray  # the storage dtype [all tokens]
    entities: np.ndarray | None  # int32 [all tokens], see mentions.py
    lengths: np.ndarray  # int64 [documents], eos included
    hashes: np.ndarray | None  # uint64 [documents, 2], for deduplication
    texts: list[str]  # those with tokens
    lines: list[int]
    counts: RecordCounts
    text_bytes: int


@dataclass(slots=True)
class ShardRecord:
    """Counts and examples of a finished shard. Line numbers count from the start of its part of the file."""

    documents: list[int]  # for each split
    tokens: list[int]
    counts: RecordCounts = field(default_factory=RecordCounts)
    lines: list[tuple[str, int]] = field(default_factory=list)  # file, and the lines of its part
    text_bytes: int = 0
    contaminated_documents: int = 0
    contaminated: list[SourceLocation] = field(default_factory=list)  # the first MAX_EXAMPLES
    evaluation_ngrams: list[int] = field(default_factory=list)  # the matched ones

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ShardRecord:
        counts = {**tree["counts"], "examples": [SourceLocation(**one) for one in tree["counts"]["examples"]]}
        contaminated = [SourceLocation(**one) for one in tree["contaminated"]]
        return cls(**{**tree, "counts": RecordCounts(**counts), "contaminated": contaminated})


def encode_block(block: RecordBlock, tokenizer: Any, rule: SplitRule, job: Job) -> EncodedBlock:
    """Parse and tokenize one block: a pure function, for any process."""
    parsed, entities = parse_block(block, job.config.text_key), None
    if job.reader is None:
        ids, lengths = tokenizer.encode_batch(parsed.texts)
    else:
        encode: Any = encode_pairs if isinstance(job.reader, PairReader) else encode_with_entities
        ids, lengths, entities = encode(parsed, block, tokenizer, job.reader)
    texts, lines = parsed.texts, parsed.lines
    text_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    if len(lengths) and not lengths.all():  # a tokenizer may drop a whole text (control characters)
        parsed.counts.empty_documents += int((lengths == 0).sum())
        texts = list(itertools.compress(texts, lengths))
        lines = list(itertools.compress(lines, lengths))
        lengths = lengths[lengths > 0]
    # After empty documents are left out: an eos alone would be a document without text.
    eos = tokenizer.special.eos
    if eos != NO_TOKEN:
        if entities is not None:
            entities = np.insert(entities, np.cumsum(lengths), -1)
        ids, lengths = np.insert(ids, np.cumsum(lengths), eos), lengths + 1
    return EncodedBlock(
        # By a keyed hash of the text: independent of file order and workers, and equal texts are in one split.
        # Pairs go by the text that they come from, so that no text is in two splits.
        splits=np.array([rule.split_index(text) for text in parsed.origins or texts], np.int64),
        tokens=to_token_dtype(ids, tokenizer.vocab_size),
        entities=entities,
        lengths=lengths,
        hashes=_text_hashes(texts) if job.config.deduplicate else None,
        texts=texts,
        lines=lines,
        counts=parsed.counts,
        text_bytes=text_bytes,
    )


def _text_hashes(texts: Sequence[str]) -> np.ndarray:
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


class _Stopped(Exception):
    """Another process failed, or the user interrupted: all work must end."""


def _new_progress(job: Job) -> np.ndarray:
    return np.zeros((len(job.shards), len(_FIELDS)), np.int64)


def _location(job: Job, number: int, progress: np.ndarray) -> str:
    """A description of where a shard's reader is."""
    _, index, line, size = progress[number, _READING].tolist()
    path, start = job.shards[number][index].path, job.shards[number][index].start
    problem = f"a record of {size:,} bytes" if size else "while it was read"
    return f"at {with_line_in_file(SourceLocation(str(path), line, problem, start), job.config.text_split)}"


class ShardBuilder:
    """Turns a numbered shard of a job into files."""

    def __init__(self, job: Job, tokenizer: Any, progress: np.ndarray | None = None) -> None:
        """Args: progress: int64 [shards, len(_FIELDS)], shared with the parent; None: a new array."""
        if tokenizer.fingerprint != job.fingerprint:
            raise DataError(
                f"the tokenizer has fingerprint {tokenizer.fingerprint} on this rank but {job.fingerprint} on rank "
                "0; give all nodes the same tokenizer files."
            )
        self.job = job
        self.tokenizer = tokenizer
        self.rule = split_rule(job.config)
        self.progress = _new_progress(job) if progress is None else progress

    def build(self, number: int, advance: Callable[[int, int], None]) -> ShardRecord:
        """Write a shard; `advance(input bytes, documents)` is called for each block, and may raise."""
        try:
            return self._build(number, advance)
        except MemoryError:
            pass  # the traceback still holds the memory that the message needs
        raise DataError(f"memory ran out {_location(self.job, number, self.progress)}; {_MEMORY_REMEDY}")

    def _build(self, number: int, advance: Callable[[int, int], None]) -> ShardRecord:
        config, num_splits = self.job.config, self.job.num_splits
        record = ShardRecord([0] * num_splits, [0] * num_splits)
        matched = np.zeros(len(self.job.evaluation.hashes) if self.job.evaluation else 0, bool)
        # The commit at its end is a rename, so a shard exists whole or not at all, and an interrupted build
        # goes on with the missing ones.
        with ShardWriter(self.job.directory, number, num_splits, self.job.arrays) as writer:
            for index, file_range in enumerate(self.job.shards[number]):
                lines = 0
                self.progress[number, _READING] = os.getpid(), index, 1, 0
                for block in read_blocks([file_range], config.text_key, config.text_split):
                    # Written before the work: a worker that is killed for memory can no longer tell which
                    # record it was.
                    self.progress[number, _RECORD] = largest_record(block)
                    encoded = encode_block(block, self.tokenizer, self.rule, self.job)
                    record.counts.merge(encoded.counts)
                    # In the worker too, so that a build that must fail does so at once; the parent checks the
                    # sum of all shards.
                    record.counts.enforce(config.on_bad_record, config.max_bad_records, config.text_split)
                    self._write(writer, encoded, record)
                    self._match_evaluation_texts(block, encoded, record, matched)
                    lines += block.num_lines
                    self.progress[number, _RECORD] = lines + 1, 0
                    advance(block.input_bytes, len(encoded.lengths))
                record.lines.append((str(file_range.path), lines))
            record.evaluation_ngrams = np.flatnonzero(matched).tolist()
            writer.commit(asdict(record))
        self.progress[number, _READING] = 0
        return record

    def _write(self, writer: ShardWriter, encoded: EncodedBlock, record: ShardRecord) -> None:
        record.text_bytes += encoded.text_bytes
        for split in range(len(record.documents)):
            here = encoded.splits == split
            arrays = {"tokens": encoded.tokens, "lengths": encoded.lengths.astype("<i4")}
            if encoded.hashes is not None:
                arrays["hashes"] = encoded.hashes
            if encoded.entities is not None:
                arrays["entities"] = encoded.entities
            if not here.all():
                of = {"tokens": np.repeat(here, encoded.lengths)}
                of["entities"] = of["tokens"]
                arrays = {name: array[of.get(name, here)] for name, array in arrays.items()}
            writer.add(split, **arrays)
            record.documents[split] += len(arrays["lengths"])
            record.tokens[split] += len(arrays["tokens"])

    def _match_evaluation_texts(
        self, block: RecordBlock, encoded: EncodedBlock, record: ShardRecord, matched: np.ndarray
    ) -> None:
        if self.job.evaluation is None:
            return
        for text, line in zip(encoded.texts, encoded.lines, strict=True):
            shared = self.job.evaluation.shared(text)
            if not len(shared):
                continue
            matched[shared] = True
            record.contaminated_documents += 1
            if len(record.contaminated) < MAX_EXAMPLES:
                problem = f"shares {len(shared)} word sequences with evaluation texts"
                record.contaminated.append(SourceLocation(block.source, line, problem, block.start))


def _shards_of(job: Job, ranks: Ranks) -> list[int]:
    """The missing shards that this rank builds."""
    return job.todo[ranks.rank :: ranks.size]


def uses_workers(job: Job, ranks: Ranks) -> bool:
    """Whether this rank uses worker processes to build its shards."""
    return job.config.workers > 0 and len(_shards_of(job, ranks)) > 0


def build_shards(job: Job, loaded: Sequence[Any], make_tokenizer: Callable[[], Any], ranks: Ranks) -> None:
    """Build this rank's part of the missing shards. Raises DataError if the build must stop.

    Args: loaded: the tokenizer; may be empty where workers are used.
    """
    config, mine = job.config, _shards_of(job, ranks)
    total = job.input_bytes * len(mine) // max(len(job.shards), 1)
    counts, documents = RecordCounts(), 0

    def advance(input_bytes: int, more_documents: int) -> None:
        nonlocal documents
        documents += more_documents
        bar.set_postfix_str(f"{documents:,} documents", refresh=False)
        bar.update(input_bytes)
        if ranks.size > 1 and job.directory.stop_requested():
            raise _Stopped

    hidden = None if ranks.rank == 0 else True  # None: shown on a terminal
    try:
        with progress_bar(total=total, unit="B", unit_scale=True, desc="tokenize", disable=hidden) as bar:
            if uses_workers(job, ranks):
                records = _records_of_workers(job, mine, make_tokenizer, advance)
            else:
                builder = ShardBuilder(job, loaded[0])
                records = (builder.build(number, advance) for number in mine)
            with closing(records):
                for record in records:
                    counts.merge(record.counts)
                    counts.enforce(config.on_bad_record, config.max_bad_records, config.text_split)
    except _Stopped:
        pass
    except BaseException:
        if ranks.size > 1:
            job.directory.request_stop()
        raise


def _records_of_workers(
    job: Job, mine: Sequence[int], make_tokenizer: Callable[[], Any], advance: Callable[[int, int], None]
) -> Generator[ShardRecord, None, None]:
    """Build shards in worker processes, in any order."""
    # The progress of each shard, and a stop flag. No lock, because a killed worker would keep it.
    shared = RawArray("q", _new_progress(job).size + 1)
    progress = _progress_in(shared)
    # Other processes even for one worker: libraries end their process when memory runs out (orjson by SIGSEGV,
    # SentencePiece by SIGABRT), and only another process can name the record.
    executor = ProcessPoolExecutor(
        min(job.config.workers, len(mine)),
        mp_context=multiprocessing.get_context("spawn"),  # fork is unsafe with the threads of tokenizers
        initializer=_start_worker,
        initargs=(job, make_tokenizer, shared),
    )
    seen = np.zeros(2, np.int64)
    others = set(multiprocessing.active_children())
    workers: set[BaseProcess] = set()
    try:
        pending = _submit(executor, mine)
        while pending:
            # Noted while they live, since a broken pool forgets its workers, whose exit statuses tell what
            # happened.
            workers |= set(multiprocessing.active_children()) - others
            done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            now = progress[:, _DONE].sum(axis=0)
            advance(*(now - seen).tolist())
            seen = now
            yield from [future.result() for future in done]
    except BrokenProcessPool:
        # A broken pool does not end a worker that it started too late, and would wait for it without end.
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        executor.shutdown(cancel_futures=True)  # afterwards the exit statuses are known
        raise _death(job, progress, workers) from None
    finally:
        shared[-1] = 1
        executor.shutdown(cancel_futures=True)


def _progress_in(shared: Any) -> np.ndarray:
    return np.frombuffer(shared, np.int64)[:-1].reshape(-1, len(_FIELDS))


def _death(job: Job, progress: np.ndarray, workers: Iterable[BaseProcess]) -> DataError:
    """The error for a worker that ended by itself or by a signal; the pool ends the others with SIGTERM."""
    for worker in workers:
        number = int(np.argmax(progress[:, 2] == worker.pid))
        if worker.exitcode in (None, 0, -signal.SIGTERM) or progress[number, 2] != worker.pid:
            continue
        code = worker.exitcode
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        location = _location(job, number, progress)
        return DataError(f"a worker process died ({how}) {location}; if memory ran out, {_MEMORY_REMEDY}")
    return DataError(f"a worker process died; if memory ran out, {_MEMORY_REMEDY}")


def _submit(executor: ProcessPoolExecutor, numbers: Sequence[int]) -> set[Future[ShardRecord]]:
    """Submit the shards to the pool, which starts its workers."""
    # Ctrl-C reaches workers too, which import for seconds before they can ignore it: they inherit that it is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(_build_in_worker, number) for number in numbers}
    except OSError as error:  # the first workers died, and the pool has closed its pipes
        raise BrokenProcessPool from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_in_worker: tuple[ShardBuilder, Any]  # set once in each worker process, by _start_worker


def _start_worker(job: Job, make_tokenizer: Callable[[], Any], shared: Any) -> None:
    global _in_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _in_worker = ShardBuilder(job, make_tokenizer(), _progress_in(shared)), shared
    return_freed_memory()


def _exit_with_parent() -> None:
    """End with the parent: a killed parent cannot end its workers, which would wait without end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    # Without cleaning up: the main thread may be in native code.
    os._exit(1)


def _build_in_worker(number: int) -> ShardRecord:
    builder, shared = _in_worker

    def advance(input_bytes: int, documents: int) -> None:
        builder.progress[number, _DONE] += input_bytes, documents
        if shared[-1]:
            raise _Stopped

    return builder.build(number, advance)
