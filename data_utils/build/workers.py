"""From ranges of files to finished shards: read, parse, tokenize and write, in this process or in worker processes.

A worker process does all the work of a shard, so only the number of a shard and its small record pass between
processes. Workers are forks, so the tokenizer is loaded once. They share no lock, so nobody waits for a killed worker.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from data_utils.build.annotations import AnnotationReader, encode_annotated
from data_utils.build.config import BuildConfig, SplitRule, parse_split, split_rule
from data_utils.build.contamination import EvaluationTexts
from data_utils.build.ranks import Ranks
from data_utils.build.shards import BuildDirectory, ShardWriter
from data_utils.build.text_pairs import TextPairReader, encode_text_pairs
from data_utils.common.errors import DataError
from data_utils.common.processes import begin_worker, submit
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
    text_bytes,
    with_line_in_file,
)
from data_utils.dataset.manifest import ENTITIES, FURTHER, SCORES, TEXT_HASHES
from data_utils.dataset.writer import to_token_dtype
from data_utils.tokenizers.special_tokens import NO_TOKEN

_POLL_SECONDS = 0.2
# The progress of a shard; array [shards]. A parent reads it to show a bar, and to say where a killed worker was.
_PROGRESS = np.dtype(
    [
        ("input_bytes", "i8"),
        ("documents", "i8"),
        # Where the reader is; 0 before and after.
        ("process", "i8"),
        ("file_range", "i8"),  # its number in the shard
        ("line", "i8"),  # in the file range; of the largest record of the block, which is being parsed
        ("record_bytes", "i8"),  # of that record
    ]
)
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
    annotation_reader: AnnotationReader | None = None
    text_pairs: TextPairReader | None = None

    @property
    def per_record(self) -> int:
        """Documents of a record."""
        return 1 if self.text_pairs is None else self.text_pairs.per_record

    @property
    def further(self) -> list[str]:
        """The suffixes of further files of the datasets."""
        return further_files(self.annotation_reader, self.text_pairs)

    @property
    def arrays(self) -> list[str]:
        """The names of a shard's arrays."""
        return [".tokens", ".lengths", *[".hashes"] * self.config.deduplicate, *self.further]

    @property
    def directory(self) -> BuildDirectory:
        return BuildDirectory(self.config.output)

    @property
    def num_splits(self) -> int:
        return len(parse_split(self.config.split))


def further_files(annotations: AnnotationReader | None, text_pairs: TextPairReader | None) -> list[str]:
    """The suffixes of further files of a build's datasets, in the order of FURTHER."""
    if text_pairs is not None:
        return [TEXT_HASHES, *[SCORES] * (text_pairs.score is not None)]
    return [ENTITIES] * (annotations is not None)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """The tokens of one block. Documents end with eos if the vocabulary has one, except those of text pairs."""

    splits: np.ndarray  # int64 [documents]: number of the split
    tokens: np.ndarray  # the storage dtype [all tokens]
    further: dict[str, np.ndarray]  # the elements of further files, by their suffix
    lengths: np.ndarray  # int64 [documents], eos included
    hashes: np.ndarray | None  # uint64 [documents, 2], for deduplication
    texts: list[str]  # those with tokens
    lines: list[int]
    counts: RecordCounts
    text_bytes: int


@dataclass(slots=True)
class ShardRecord:
    """Counts and examples of a finished shard. Line numbers count from the start of its range of the file."""

    documents: list[int]  # for each split
    tokens: list[int]
    counts: RecordCounts = field(default_factory=RecordCounts)
    lines: list[tuple[str, int]] = field(default_factory=list)  # file, and the lines of its range
    text_bytes: int = 0
    contaminated_documents: int = 0
    contaminated: list[SourceLocation] = field(default_factory=list)  # the first MAX_EXAMPLES
    evaluation_ngrams: list[int] = field(default_factory=list)  # the matched ones

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ShardRecord:
        """The record whose `asdict` is `tree`."""
        examples = [SourceLocation(**location) for location in tree["counts"]["examples"]]
        counts = RecordCounts(**{**tree["counts"], "examples": examples})
        contaminated = [SourceLocation(**location) for location in tree["contaminated"]]
        return cls(**{**tree, "counts": counts, "contaminated": contaminated})


def encode_block(block: RecordBlock, tokenizer: Any, rule: SplitRule, job: Job) -> EncodedBlock:
    """Parse and tokenize one block: a pure function, for any process."""
    if job.text_pairs is not None:
        return _encode_pairs(block, tokenizer, rule, job)
    parsed, entities = parse_block(block, job.config.text_key), None
    if job.annotation_reader is None:
        ids, lengths = tokenizer.encode_batch(parsed.texts)
    else:
        ids, lengths, entities = encode_annotated(parsed, block, tokenizer, job.annotation_reader)
    texts, lines = parsed.texts, parsed.lines
    total_bytes = sum(map(text_bytes, texts))
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
        further={} if entities is None else {ENTITIES: entities},
        lengths=lengths,
        hashes=_text_hashes(texts) if job.config.deduplicate else None,
        texts=texts,
        lines=lines,
        counts=parsed.counts,
        text_bytes=total_bytes,
    )


def _encode_pairs(block: RecordBlock, tokenizer: Any, rule: SplitRule, job: Job) -> EncodedBlock:
    """As `encode_block`, of text pairs. A record is in the split of its query, and so all of a query's."""
    assert job.text_pairs is not None
    pairs, size = encode_text_pairs(block, tokenizer, job.text_pairs), job.per_record
    hashes = None
    if job.config.deduplicate:  # of the whole record and the number in it: documents stay or go by records
        records = ["\0".join(pairs.texts[start : start + size]) for start in range(0, len(pairs.texts), size)]
        hashes = _text_hashes([f"{number} {record}" for record in records for number in range(size)])
    splits = [rule.split_index(query) for query in pairs.texts[::size]]
    further = {TEXT_HASHES: pairs.text_hashes, SCORES: pairs.scores}
    is_text = pairs.lengths > 0
    return EncodedBlock(
        splits=np.repeat(np.array(splits, np.int64), size),
        tokens=to_token_dtype(pairs.ids, tokenizer.vocab_size),
        further={suffix: further[suffix] for suffix in job.further},
        lengths=pairs.lengths,
        hashes=hashes,
        texts=list(itertools.compress(pairs.texts, is_text)),
        lines=list(itertools.compress(pairs.lines, is_text)),
        counts=pairs.counts,
        text_bytes=sum(map(text_bytes, pairs.texts)),
    )


def _text_hashes(texts: Sequence[str]) -> np.ndarray:
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


class _Stopped(Exception):
    """Another process failed, or the user interrupted: all work must end."""


def _location(job: Job, progress: np.ndarray, number: int) -> str:
    """A description of where a shard's reader is. Args: progress: _PROGRESS [shards]."""
    state = progress[number]
    file_range = job.shards[number][state["file_range"]]
    size = int(state["record_bytes"])
    problem = f"a record of {size:,} bytes" if size else "while it was read"
    location = SourceLocation(str(file_range.path), int(state["line"]), problem, file_range.start)
    return f"at {with_line_in_file(location, job.config.text_split)}"


class ShardBuilder:
    """Turns a numbered shard of a job into files."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        if tokenizer.fingerprint != job.fingerprint:
            raise DataError(
                f"the tokenizer has fingerprint {tokenizer.fingerprint} on this rank but {job.fingerprint} on rank "
                "0; give all nodes the same tokenizer files."
            )
        self.job = job
        self.tokenizer = tokenizer
        self.rule = split_rule(job.config)
        # Forks share them with their parent.
        self.progress = np.frombuffer(mmap.mmap(-1, len(job.shards) * _PROGRESS.itemsize), _PROGRESS)
        self.stop_flag = np.frombuffer(mmap.mmap(-1, 1), np.bool_)

    def build(self, number: int, advance: Callable[[int, int], None]) -> ShardRecord:
        """Write a shard; `advance(input bytes, documents)` is called for each block, and may raise."""
        try:
            return self._build(number, advance)
        except MemoryError:
            pass  # the traceback still holds the memory that the message needs
        where = _location(self.job, self.progress, number)
        raise DataError(f"memory ran out {where}; {_MEMORY_REMEDY}")

    def _build(self, number: int, advance: Callable[[int, int], None]) -> ShardRecord:
        config, num_splits = self.job.config, self.job.num_splits
        record = ShardRecord([0] * num_splits, [0] * num_splits)
        matched_ngrams = np.zeros(len(self.job.evaluation.hashes) if self.job.evaluation else 0, bool)
        progress = self.progress
        # The commit at its end is a rename, so a shard exists whole or not at all, and an interrupted build
        # goes on with the missing ones.
        with ShardWriter(self.job.directory, number, num_splits, self.job.arrays) as writer:
            for index, file_range in enumerate(self.job.shards[number]):
                lines = 0
                progress["process"][number], progress["file_range"][number] = os.getpid(), index
                progress["line"][number], progress["record_bytes"][number] = 1, 0
                pairs = self.job.text_pairs
                key = config.text_key if pairs is None else pairs.columns
                for block in read_blocks([file_range], key, config.text_split):
                    # Written before the work: a worker that is killed for memory can no longer tell which
                    # record it was.
                    progress["line"][number], progress["record_bytes"][number] = largest_record(block)
                    encoded = encode_block(block, self.tokenizer, self.rule, self.job)
                    record.counts.merge(encoded.counts)
                    # In the worker too, so that a build that must fail does so at once; the parent checks the
                    # sum of all shards.
                    record.counts.enforce(config.on_bad_record, config.max_bad_records, config.text_split)
                    self._write(writer, encoded, record)
                    self._match_evaluation_texts(block, encoded, record, matched_ngrams)
                    lines += block.num_lines
                    progress["line"][number], progress["record_bytes"][number] = lines + 1, 0
                    advance(block.input_bytes, len(encoded.lengths))
                record.lines.append((str(file_range.path), lines))
            record.evaluation_ngrams = np.flatnonzero(matched_ngrams).tolist()
            writer.commit(asdict(record))
        for name in ("process", "file_range", "line", "record_bytes"):
            progress[name][number] = 0
        return record

    def _write(self, writer: ShardWriter, encoded: EncodedBlock, record: ShardRecord) -> None:
        record.text_bytes += encoded.text_bytes
        for split in range(len(record.documents)):
            in_split = encoded.splits == split
            arrays = {".tokens": encoded.tokens, ".lengths": encoded.lengths.astype("<i4"), **encoded.further}
            if encoded.hashes is not None:
                arrays[".hashes"] = encoded.hashes
            if not in_split.all():  # otherwise nothing is copied
                masks = element_masks(in_split, encoded.lengths, self.job.per_record)
                arrays = {name: array[masks[counted_in(name)]] for name, array in arrays.items()}
            writer.add(split, arrays)
            record.documents[split] += len(arrays[".lengths"])
            record.tokens[split] += len(arrays[".tokens"])

    def _match_evaluation_texts(
        self, block: RecordBlock, encoded: EncodedBlock, record: ShardRecord, matched_ngrams: np.ndarray
    ) -> None:
        if self.job.evaluation is None:
            return
        for text, line in zip(encoded.texts, encoded.lines, strict=True):
            shared = self.job.evaluation.shared(text)
            if not len(shared):
                continue
            matched_ngrams[shared] = True
            record.contaminated_documents += 1
            if len(record.contaminated) < MAX_EXAMPLES:
                problem = f"shares {len(shared)} word sequences with evaluation texts"
                record.contaminated.append(SourceLocation(block.source, line, problem, block.start))


def counted_in(name: str) -> str:
    """What an array of a shard has an element of."""
    return "token" if name == ".tokens" else FURTHER[name][0] if name in FURTHER else "document"


def element_masks(is_kept: np.ndarray, lengths: np.ndarray, per_record: int) -> dict[str, np.ndarray]:
    """Masks of tokens, documents and records, bool. Args: is_kept: [documents], equal in a record."""
    return {
        "token": np.repeat(is_kept, lengths), "document": is_kept, "record": is_kept[::per_record],
    }  # fmt: skip


def _shards_of_rank(job: Job, ranks: Ranks) -> list[int]:
    """The numbers of the unfinished shards that this rank builds."""
    return job.todo[ranks.rank :: ranks.size]


def build_shards(job: Job, tokenizer: Any, ranks: Ranks) -> None:
    """Build this rank's share of the unfinished shards. Raises DataError if the build must stop."""
    config, numbers = job.config, _shards_of_rank(job, ranks)
    total = job.input_bytes * len(numbers) // max(len(job.shards), 1)
    counts, documents = RecordCounts(), 0

    def advance(input_bytes: int, new_documents: int) -> None:
        nonlocal documents
        documents += new_documents
        bar.set_postfix_str(f"{documents:,} documents", refresh=False)
        bar.update(input_bytes)
        if ranks.size > 1 and job.directory.stop_requested():
            raise _Stopped

    hidden = None if ranks.rank == 0 else True  # None: shown on a terminal
    try:
        builder = ShardBuilder(job, tokenizer)
        with progress_bar(total=total, unit="B", unit_scale=True, desc="tokenize", disable=hidden) as bar:
            if config.workers > 0 and numbers:
                records = _build_in_workers(builder, numbers, advance)
            else:
                records = (builder.build(number, advance) for number in numbers)
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


def _build_in_workers(
    builder: ShardBuilder, numbers: Sequence[int], advance: Callable[[int, int], None]
) -> Generator[ShardRecord, None, None]:
    """Build shards in worker processes; yields their records in any order."""
    job, progress = builder.job, builder.progress
    # Other processes even for one worker: libraries end their process when memory runs out (orjson by SIGSEGV,
    # SentencePiece by SIGABRT), and only another process can name the record.
    executor = ProcessPoolExecutor(
        min(job.config.workers, len(numbers)),
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(builder,),
    )
    reported_bytes = reported_documents = 0
    other_children = set(multiprocessing.active_children())
    workers: set[BaseProcess] = set()
    try:
        pending = set(submit(executor, _build_shard_in_worker, numbers))
        # Noted, since a broken pool forgets its workers, whose exit statuses tell what happened.
        workers = set(multiprocessing.active_children()) - other_children
        while pending:
            done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            input_bytes, documents = int(progress["input_bytes"].sum()), int(progress["documents"].sum())
            advance(input_bytes - reported_bytes, documents - reported_documents)
            reported_bytes, reported_documents = input_bytes, documents
            yield from [future.result() for future in done]
    except BrokenProcessPool:
        executor.shutdown(cancel_futures=True)  # afterwards the exit statuses are known
        raise _worker_death(job, progress, workers) from None
    finally:
        builder.stop_flag[0] = True
        executor.shutdown(cancel_futures=True)


def _worker_death(job: Job, progress: np.ndarray, workers: Iterable[BaseProcess]) -> DataError:
    """The error for a worker that ended by itself or by a signal; the pool ends the others with SIGTERM."""
    for worker in workers:
        number = int(np.argmax(progress["process"] == worker.pid))
        status = worker.exitcode
        if status in (None, 0, -signal.SIGTERM) or progress["process"][number] != worker.pid:
            continue
        cause = signal.Signals(-status).name if status < 0 else f"status {status}"
        location = _location(job, progress, number)
        return DataError(f"a worker process died ({cause}) {location}; if memory ran out, {_MEMORY_REMEDY}")
    return DataError(f"a worker process died; if memory ran out, {_MEMORY_REMEDY}")


_builder: ShardBuilder  # set once in each worker by _start_worker


def _start_worker(builder: ShardBuilder) -> None:
    global _builder
    begin_worker()
    gc.freeze()  # a collection would write to, and so copy, all that the worker shares with its parent
    # The processes are the parallelism: no threads in the libraries of tokenizers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    _builder = builder


def _build_shard_in_worker(number: int) -> ShardRecord:
    def advance(input_bytes: int, documents: int) -> None:
        _builder.progress["input_bytes"][number] += input_bytes
        _builder.progress["documents"][number] += documents
        if _builder.stop_flag[0]:
            raise _Stopped

    return _builder.build(number, advance)
