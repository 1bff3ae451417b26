"""Build a token dataset from documents: cut into shards, tokenize in parallel, merge in order, write safely.

The input is cut by bytes into a fixed plan of shards. Worker processes, of one or many MPI ranks, turn whole shards
into tokens and write them to PREFIX.build (see shards.py). Then rank 0 joins the shards in the order of the input. So
the output has the same bytes for any number of processes and ranks and any size of shards, and a build that was stopped
continues with the missing shards.

A keyed hash of its text decides a document's split: the order of the files does not matter, and exact duplicates are
always in one split. Nothing appears under the final names before everything is on disk.

The workers' blocks bound the memory, not the size of the input; `deduplicate` adds about 40 bytes for each document.
The price of shards: every token is written twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.build.annotations import AnnotationReader, open_annotation_reader
from data_utils.build.config import BuildConfig, output_prefixes, parse_split
from data_utils.build.contamination import EvaluationTexts, read_evaluation_texts
from data_utils.build.labelled_pairs import WITHOUT, PairReader
from data_utils.build.ranks import Ranks
from data_utils.build.shards import BuildDirectory
from data_utils.build.summary import BuildReport, DocumentStatistics
from data_utils.build.text_pairs import TextPairReader, open_text_pairs
from data_utils.build.workers import (
    Job,
    ShardRecord,
    build_shards,
    counted_in,
    element_masks,
    further_files,
)
from data_utils.common.errors import DataError
from data_utils.common.memory import return_freed_memory
from data_utils.common.progress import progress_bar
from data_utils.corpus.documents import (
    MAX_EXAMPLES,
    RecordCounts,
    SourceLocation,
    check_text_key,
    is_one_document,
    plan_shards,
)
from data_utils.corpus.inputs import expand_inputs
from data_utils.corpus.mentions import KEPT
from data_utils.corpus.stored_files import InputFile, stored_bytes
from data_utils.dataset.cleaning_record import cleaning_records
from data_utils.dataset.manifest import ENTITIES, existing_files
from data_utils.dataset.sources import described_sources
from data_utils.dataset.writer import IndexedDatasetWriter, remove_dataset, token_dtype
from data_utils.storage.objects import StoredObject
from data_utils.tokenizers.fast.encoders import FAST_FROM_CHARACTERS
from data_utils.tokenizers.special_tokens import NO_TOKEN

_PLAN_VERSION = 1
_SHARD_FILES = 2048  # at most, since opening a file takes as long as tokenizing several KB of text
_MERGE_DOCUMENTS = 4096  # documents that are joined at a time


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer's identity in a plan and a manifest."""

    vocab_size: int
    eos: int  # or NO_TOKEN
    fingerprint: str
    config: Any


def build_corpus(
    config: BuildConfig,
    make_tokenizer: Callable[[], Any],
    ranks: Ranks | None = None,
) -> BuildReport | None:
    """Build the datasets of `config`; see the module docstring. None: the same build was killed after they were done.

    Args:
        make_tokenizer: gives an object with `encode_batch`, `use_fast_encoder`, `special.eos`, `vocab_size`,
            `fingerprint` and `config` (see data_utils/tokenizers/tokenizer.py). Called once on each rank.
        ranks: the MPI ranks that share the work, all with the same `config` and file system.
    Raises: DataError for bad input, a split without documents, output that exists or cannot be written,
        another build that was started and not finished, a dead worker.
    """
    ranks = ranks or Ranks()
    started = time.monotonic()
    writers: list[IndexedDatasetWriter] = []
    with ExitStack() as stack:
        tokenizer = ranks.on_each(make_tokenizer)  # on each: one node may lack the files
        facts = TokenizerFacts(
            tokenizer.vocab_size, tokenizer.special.eos, tokenizer.fingerprint, tokenizer.config
        )
        job = ranks.on_first(lambda: _start(config, facts, tokenizer.encode_batch, stack, writers))
        if job is None:
            return None
        if job.todo and job.annotation_reader is None and job.input_bytes >= FAST_FROM_CHARACTERS:
            tokenizer.use_fast_encoder()  # once, and not in each worker
        return_freed_memory()  # reading the tokenizer took twice the memory that it holds
        ranks.on_each(lambda: build_shards(job, tokenizer, ranks))
        return ranks.on_first(lambda: _finish(job, facts, writers, started))


def _start(
    config: BuildConfig,
    tokenizer: TokenizerFacts,
    encode_batch: Callable[[list[str]], tuple[np.ndarray, np.ndarray]],
    stack: ExitStack,
    writers: list[IndexedDatasetWriter],
) -> Job | None:
    """Check everything that can be checked before the work, and open the output. None: there is none."""
    paths = expand_inputs(config.inputs)
    evaluation_paths = expand_inputs(config.evaluation_inputs) if config.evaluation_inputs else []
    check_text_key(config.text_key, [*paths, *evaluation_paths])
    _sources(paths)  # refuses now what the manifest has no room for, not after hours of work
    cleaning_records(paths)
    annotation_reader = open_annotation_reader(config, paths)
    text_pairs = open_text_pairs(config, paths, encode_batch)
    prefixes = output_prefixes(config)
    directory = BuildDirectory(config.output)
    # A build that was killed while its datasets were put in place finds its own output there, and goes on.
    may_be_ours = not config.restart and (directory.is_committing() or directory.is_done())
    _refuse_existing(prefixes, paths, config.overwrite or may_be_ours)
    evaluation = None
    if config.evaluation_inputs:
        evaluation = read_evaluation_texts(config, evaluation_paths)
    for prefix in prefixes:  # opened now for their lock: only one build at a time
        further = further_files(annotation_reader, text_pairs)
        writer = IndexedDatasetWriter(prefix, tokenizer.vocab_size, further)
        writers.append(stack.enter_context(writer))
    plan = _plan(config, tokenizer, paths, evaluation, annotation_reader, text_pairs)
    if not config.restart and directory.is_done(plan) and all(map(existing_files, prefixes)):
        directory.remove()
        return None
    if not directory.is_committing():  # what is there is another build's
        _refuse_existing(prefixes, paths, config.overwrite)
    stack.callback(_remove_if_nothing_is_finished, directory)
    directory.open(plan, config.restart)
    shards = plan_shards(paths, config.text_split, config.shard_bytes, _SHARD_FILES)
    finished = directory.finished()
    return Job(
        config=config,
        shards=shards,
        todo=[number for number in range(len(shards)) if number not in finished],
        fingerprint=tokenizer.fingerprint,
        dtype=token_dtype(tokenizer.vocab_size),
        input_bytes=sum(map(stored_bytes, paths)),
        evaluation=evaluation,
        annotation_reader=annotation_reader,
        text_pairs=text_pairs,
    )


def _plan(
    config: BuildConfig,
    tokenizer: TokenizerFacts,
    paths: Sequence[InputFile],
    evaluation: EvaluationTexts | None,
    annotation_reader: AnnotationReader | None,
    text_pairs: TextPairReader | None,
) -> dict[str, Any]:
    """Everything that the shards depend on. A build with another plan cannot use them."""
    annotations = None
    if annotation_reader is not None:
        annotations = [annotation_reader.key, annotation_reader.min_score, annotation_reader.fingerprint]
    return {
        "plan_version": _PLAN_VERSION,
        "tokenizer": f"{getattr(tokenizer.config, 'kind', '?')} {tokenizer.fingerprint}",
        "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "text_key": config.text_key,
        "text_split": config.text_split, "split": config.split, "split_seed": config.split_seed,
        "deduplicate": config.deduplicate, "evaluation_inputs": evaluation and evaluation.fingerprint,
        "entities": annotations, "shard_bytes": config.shard_bytes, "inputs": _file_identities(paths),
        "shard_files": _SHARD_FILES, "text_pairs": text_pairs and text_pairs.plan(),
    }  # fmt: skip


def _file_identities(paths: Iterable[InputFile]) -> list[list[Any]]:
    identities: list[list[Any]] = []
    for path in paths:
        if isinstance(path, StoredObject):
            # Pinned by the listing; each range that is read is compared with it.
            identities.append([path.label, path.size, path.identity])
            continue
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); the build needs this input, restore it."
            ) from None
        # Size and time instead of a checksum, which would read all input twice.
        identities.append([str(path), stat.st_size, stat.st_mtime_ns])
    return identities


def _remove_if_nothing_is_finished(directory: BuildDirectory) -> None:
    """Remove the directory of a build without finished shards: there is nothing to resume or to discard."""
    with suppress(OSError):
        if directory.path.is_dir() and not directory.finished() and not directory.is_committing():
            directory.remove()


def _finish(
    job: Job,
    tokenizer: TokenizerFacts,
    writers: Sequence[IndexedDatasetWriter],
    started: float,
) -> BuildReport:
    """Join the shards, in order, and put the datasets in place."""
    config, directory = job.config, job.directory
    records = [ShardRecord.from_tree(directory.record(number)) for number in range(len(job.shards))]
    counts, contaminated = _merge_counts(records)
    paths = list(dict.fromkeys(file_range.path for shard in job.shards for file_range in shard))
    if job.todo:  # otherwise nothing was read now, and `open` has compared the inputs
        plan = _plan(config, tokenizer, paths, job.evaluation, job.annotation_reader, job.text_pairs)
        directory.require_unchanged(plan)  # first: changed input may have bad records, too
    counts.enforce(config.on_bad_record, config.max_bad_records, config.text_split)
    statistics = DocumentStatistics()
    duplicates = _join(job, records, writers, statistics)
    contamination = None
    if job.evaluation is not None:
        contamination = _contamination_entry(job.evaluation, records, contaminated)
    try:
        _require_documents(writers, counts, config)
    except DataError:
        directory.remove()  # no option can make these shards useful
        raise
    manifest = _manifest(tokenizer, config, paths, counts)
    if duplicates is not None:
        manifest["duplicates"] = duplicates
    if contamination is not None:
        manifest["contamination"] = contamination
    if (reader := job.annotation_reader) is not None:
        entry = {"ids": reader.fingerprint, "count": reader.count, "min_score": reader.min_score}
        if isinstance(reader, PairReader):
            entry["names"] = reader.names
        counts.mentions[KEPT] = statistics.entities  # without those of documents that were left out
        manifest["entities"] = {**entry, "mentions": dict(sorted(counts.mentions.items()))}
    if job.text_pairs is not None:
        manifest |= {"documents_end_with_eos": False, "text_pairs": job.text_pairs.entry(counts.mentions)}
    _commit(writers, list(parse_split(config.split)), manifest, directory)
    return BuildReport(
        documents={str(writer.prefix): writer.num_documents for writer in writers},
        tokens={str(writer.prefix): writer.num_tokens for writer in writers},
        counts=counts,
        text_bytes=sum(record.text_bytes for record in records),
        seconds=time.monotonic() - started,
        shards=len(job.shards),
        finished_before=len(job.shards) - len(job.todo),
        built_text_bytes=sum(records[number].text_bytes for number in job.todo),
        duplicates=duplicates,
        contamination=contamination,
        shape=None if job.text_pairs else statistics.shape(),
        per_record=job.per_record,
        whole_files=sum(is_one_document(path, config.text_split) for path in paths),
    )


def _merge_counts(records: Sequence[ShardRecord]) -> tuple[RecordCounts, list[SourceLocation]]:
    """Add up the counts of all shards, and make line numbers count from the start of the files."""
    counts = RecordCounts()
    contaminated: list[SourceLocation] = []
    lines_before: dict[str, int] = {}  # file -> lines of it in the shards so far

    def in_file(locations: Iterable[SourceLocation]) -> list[SourceLocation]:
        return [
            SourceLocation(
                location.source, location.line + lines_before.get(location.source, 0), location.problem
            )
            for location in locations
        ]

    for record in records:
        record.counts.examples = in_file(record.counts.examples)
        counts.merge(record.counts)
        contaminated += in_file(record.contaminated)[: MAX_EXAMPLES - len(contaminated)]
        for source, lines in record.lines:
            lines_before[source] = lines_before.get(source, 0) + lines
        record.lines = []  # the names of all files, which may be a million
    return counts, contaminated


def _join(
    job: Job,
    records: Sequence[ShardRecord],
    writers: Sequence[IndexedDatasetWriter],
    statistics: DocumentStatistics,
) -> int | None:
    """Append all shards to the writers. Returns how many duplicates were left out; None: not asked for."""
    duplicates = 0
    total = sum(sum(record.tokens) for record in records)
    with progress_bar(total=total, unit="token", unit_scale=True, desc="join") as bar:
        for split, writer in enumerate(writers):
            is_kept = _first_occurrences(job, records, split) if job.config.deduplicate else None
            start = 0  # of the shard in the documents of the split
            for number, record in enumerate(records):
                stop, num_tokens = start + record.documents[split], record.tokens[split]
                tokens, lengths = job.directory.read(number, split, job.dtype, stop - start, num_tokens)
                shard_is_kept = None if is_kept is None else is_kept[start:stop]
                counts = {"token": num_tokens, "document": stop - start}
                counts["record"] = (stop - start) // job.per_record
                further = {
                    suffix: job.directory.further(number, split, suffix, counts) for suffix in job.further
                }
                _append(writer, statistics, tokens, lengths, shard_is_kept, further, job.per_record)
                start = stop
                bar.update(num_tokens)
            duplicates += (start - writer.num_documents) // job.per_record
    return duplicates if job.config.deduplicate else None


def _append(
    writer: IndexedDatasetWriter,
    statistics: DocumentStatistics,
    tokens: np.ndarray,
    lengths: np.ndarray,
    is_kept: np.ndarray | None,
    further: Mapping[str, np.ndarray],
    per_record: int,
) -> None:
    """Append the documents of a shard to a dataset, some at a time.

    Args: is_kept: bool [documents]; None: all are. further: the elements of further files, by their suffix.
    """
    start, step = 0, max(1, _MERGE_DOCUMENTS // per_record) * per_record
    for first in range(0, len(lengths), step):
        batch_lengths = lengths[first : first + step]
        stop = start + int(batch_lengths.sum(dtype=np.int64))
        parts = {
            "token": slice(start, stop), "document": slice(first, first + step),
            "record": slice(first // per_record, (first + step) // per_record),
        }  # fmt: skip
        arrays = {".tokens": tokens, ".lengths": lengths, **further}
        arrays = {name: array[parts[counted_in(name)]] for name, array in arrays.items()}
        if is_kept is not None and not (mask := is_kept[parts["document"]]).all():
            masks = element_masks(mask, batch_lengths, per_record)
            arrays = {name: array[masks[counted_in(name)]] for name, array in arrays.items()}
        writer.add(*arrays.values())
        if per_record == 1:  # the texts of pairs are short, and repeat
            statistics.add(arrays[".tokens"], arrays[".lengths"])
        if ENTITIES in arrays:
            statistics.entities += int((arrays[ENTITIES] >= 0).sum())
        start = stop


def _first_occurrences(job: Job, records: Sequence[ShardRecord], split: int) -> np.ndarray:
    """Which documents of a split are not equal to an earlier one: bool [documents of all shards]."""
    hashes = [job.directory.hashes(i, split, record.documents[split]) for i, record in enumerate(records)]
    low, high = np.concatenate(hashes).T
    order = np.lexsort((low, high))  # stable: equal texts stay in their order
    is_repeated = (low[order][1:] == low[order][:-1]) & (high[order][1:] == high[order][:-1])
    is_first = np.ones(len(order), bool)
    is_first[order[1:][is_repeated]] = False
    return is_first


def _contamination_entry(
    evaluation: EvaluationTexts, records: Sequence[ShardRecord], examples: Sequence[SourceLocation]
) -> dict[str, Any]:
    """The entry of the manifest."""
    matched_ngrams = np.zeros(len(evaluation.hashes), bool)
    for record in records:
        matched_ngrams[record.evaluation_ngrams] = True
    return {
        "documents": sum(record.contaminated_documents for record in records),
        "evaluation_texts": evaluation.num_texts,
        "evaluation_texts_too_short": evaluation.num_too_short,
        "evaluation_texts_found": evaluation.num_matched(matched_ngrams),
        "evaluation_ngrams": len(matched_ngrams),
        "evaluation_ngrams_found": int(matched_ngrams.sum()),
        "examples": [str(location) for location in examples],
    }


def _refuse_existing(prefixes: Iterable[str], inputs: Iterable[InputFile], overwrite: bool) -> None:
    existing = [path for prefix in prefixes for path in existing_files(prefix)]
    for path in existing:
        if any(isinstance(source, Path) and path.samefile(source) for source in inputs):
            raise DataError(f"output {path} is also an input; choose another --output.")
    if existing and not overwrite:
        raise DataError(f"output {existing[0]} already exists; choose another --output or pass --overwrite.")


def _require_documents(
    writers: Sequence[IndexedDatasetWriter], counts: RecordCounts, config: BuildConfig
) -> None:
    total = sum(writer.num_documents for writer in writers)
    if not total and config.markers and (texts := counts.mentions.get(WITHOUT, 0)):
        raise DataError(
            f"none of the {texts:,} texts has a sentence that follows another one and begins with a marker of "
            f"{config.markers} and a comma; give other --markers or other texts."
        )
    if not total:
        raise DataError(
            f"the corpus has no document with tokens ({counts.empty_documents} empty documents, "
            f"{counts.blank_lines} blank lines, {counts.num_bad} bad records); check the input."
        )
    for writer in writers:
        if not writer.num_documents:
            raise DataError(
                f"split {writer.prefix.name} receives none of the {total} documents; give it a larger fraction or "
                "add documents."
            )


def _commit(
    writers: Sequence[IndexedDatasetWriter],
    names: Sequence[str],
    manifest: dict[str, Any],
    directory: BuildDirectory,
) -> None:
    """Put the splits in place, after all the old ones are removed: splits of two builds must never mix."""
    for writer in writers:
        writer.seal()
    # From here on an interrupted build can only be finished, not undone: old datasets are removed.
    directory.mark_committing()
    for writer in writers:
        remove_dataset(writer.prefix)
    for writer, name in zip(writers, names, strict=True):
        writer.finish({**manifest, "split": {**manifest["split"], "name": name or None}})
    directory.mark_done()
    directory.remove()


def _sources(paths: Sequence[InputFile]) -> dict[str, Any]:
    return described_sources([(str(path), stored_bytes(path)) for path in paths])


def _manifest(
    tokenizer: TokenizerFacts, config: BuildConfig, paths: Sequence[InputFile], counts: RecordCounts
) -> dict[str, Any]:
    """The entries that the writer does not know; no times or worker counts, so equal input gives equal bytes."""
    return {
        "split": {"name": None, "rule": config.split or None, "seed": config.split_seed},
        "eos": tokenizer.eos,
        "documents_end_with_eos": tokenizer.eos != NO_TOKEN,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "config": asdict(tokenizer.config)},
        **_sources(paths),
        "text_key": config.text_key,
        "text_split": config.text_split,
        "bad_records": dict(sorted(counts.bad.items())),
        "bad_record_examples": [str(location) for location in counts.examples],
        "empty_documents": counts.empty_documents,
        "blank_lines": counts.blank_lines,
        **({"cleaning": records} if (records := cleaning_records(paths)) else {}),
    }
