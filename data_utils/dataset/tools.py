"""Tools for finished datasets: write a missing manifest, join datasets, and describe them.

All read the files in chunks. `merge_datasets` copies tokens and does not tokenize again. The result has the same bytes
as one build of all the inputs in that order (except for splits).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.checksums import describe_file, identity
from data_utils.common.errors import DataError
from data_utils.common.files import disk_errors, locked, require_prefix, write_atomically, write_picture
from data_utils.common.progress import progress_bar
from data_utils.dataset.indexed_dataset import IndexedDataset, document_starts, file_sizes, read_header
from data_utils.dataset.manifest import (
    ENTITIES,
    FURTHER,
    SCORES,
    TEXT_HASHES,
    dataset_path,
    documents_per_record,
    existing_files,
    is_left_by_a_stopped_writer,
    manifest_bytes,
    require_finished,
)
from data_utils.dataset.sources import described_sources, sources_of
from data_utils.dataset.verification import verify
from data_utils.dataset.writer import IndexedDatasetWriter

_DOCUMENTS = 1 << 16  # at a time
_TOKENS = 1 << 22
_SAME = ("eos", "vocab_size", "dtype", "documents_end_with_eos")  # manifest entries that must agree
_PERCENTS = (1, 10, 25, 50, 75, 90, 99)


def adopt_dataset(prefix: str, by_sequence: bool = False) -> IndexedDataset:
    """Check the files of another program and write their manifest.

    Args: by_sequence: each sequence is a document, also where the index joins several, such as sentences, to one.
    Raises: DataError for a dataset that has a manifest, that a build has not finished, or that is damaged.
    """
    if dataset_path(prefix, ".json").exists():
        raise DataError(
            f"dataset {prefix} already has a manifest; adopt is only for files of another program."
        )
    require_finished(prefix)
    file_sizes(prefix)  # both are there
    dtype, num_sequences, num_boundaries = read_header(prefix)
    files = _describe_files(prefix)
    num_tokens = files[".bin"]["bytes"] // dtype.itemsize
    facts = {"files": files, "num_documents": num_sequences, "num_tokens": num_tokens, "dtype": dtype.name}
    facts["adopted"] = True
    sequences = IndexedDataset(prefix, sequential=True, manifest=facts)
    facts["largest_id"] = verify(sequences)
    if not by_sequence:
        starts = document_starts(prefix, num_sequences, num_boundaries)
        if len(starts) < num_sequences:
            ends = np.append(sequences.pointers[starts[1:]], files[".bin"]["bytes"])
            documents = int((ends > sequences.pointers[starts]).sum())
            facts |= {"num_sequences": num_sequences, "num_documents": documents}
    return _write(prefix, facts)


def _describe_files(prefix: str) -> dict[str, Any]:
    return {suffix: describe_file(dataset_path(prefix, suffix)) for suffix in (".bin", ".idx")}


def _write(prefix: str, facts: Mapping[str, Any]) -> IndexedDataset:
    path = dataset_path(prefix, ".json")
    with disk_errors(path, "place"), locked(path):
        # No name that a build gives: what a stopped build left is refused here, what this leaves is written over.
        write_atomically(path, manifest_bytes(facts), ending=".adopted.partial")
    return IndexedDataset(prefix)


def merge_datasets(prefixes: Sequence[str], output: str, overwrite: bool = False) -> IndexedDataset:
    """Join datasets, in the given order, into one under the prefix `output`.

    Raises: DataError for datasets that cannot be opened or that have different tokenizers, and for output
        that exists (without `overwrite`), is also an input, or cannot be written.
    """
    datasets = [IndexedDataset(prefix, sequential=True) for prefix in prefixes]
    first = _identity(datasets[0])
    for dataset in datasets[1:]:
        if _identity(dataset) != first:
            raise DataError(
                f"datasets {datasets[0].prefix} and {dataset.prefix} were built with different tokenizers; "
                f"rebuild one of them."
            )
    entity_ids = [dataset.manifest.get("entities", {}).get("ids") for dataset in datasets]
    for dataset, ids in zip(datasets, entity_ids, strict=True):
        if ids != entity_ids[0]:
            raise DataError(
                f"datasets {datasets[0].prefix} and {dataset.prefix} do not have the same entities or labels; "
                "rebuild one with the --entity-ids, --capitals, --spans-key, --labels or --markers of the other."
            )
    _require_same_text_pairs(datasets)
    require_prefix(str(output))
    existing = existing_files(output)
    inputs = [dataset_path(prefix, ".bin") for prefix in prefixes]
    if any(path.samefile(existing_path) for existing_path in existing for path in inputs):
        raise DataError(f"output {output} is also an input; choose another --output.")
    if existing and not overwrite and not is_left_by_a_stopped_writer(output):
        raise DataError(f"output {existing[0]} already exists; choose another --output or pass --overwrite.")
    resolved = [path.resolve() for path in inputs]
    repeated = next((prefix for i, prefix in enumerate(prefixes) if resolved[i] in resolved[:i]), None)
    if repeated is not None:
        raise DataError(
            f"dataset {repeated} is given twice; give each dataset once (to repeat a corpus, raise its weight in "
            "data.train)."
        )
    facts = _merged_manifest(datasets)  # refused before the work, if at all
    total = sum(dataset.num_tokens for dataset in datasets)
    with (
        IndexedDatasetWriter(output, first["vocab_size"], _further(datasets[0])) as writer,
        progress_bar(total=total, unit="token", unit_scale=True, desc="merge") as bar,
    ):
        for dataset in datasets:
            per_record = documents_per_record(dataset.manifest)
            step = _DOCUMENTS // per_record * per_record or per_record
            for start in range(0, dataset.num_documents, step):
                lengths = dataset.lengths[start : start + step]
                begin = int(dataset.pointers[start]) // dataset.dtype.itemsize
                tokens = slice(begin, begin + int(lengths.sum(dtype=np.int64)))
                records = slice(start // per_record, (start + len(lengths)) // per_record)
                further = {
                    ENTITIES: (dataset.entities, tokens),
                    TEXT_HASHES: (dataset.text_hashes, slice(start, start + step)),
                    SCORES: (dataset.scores, records),
                }
                arrays = [array[part] for array, part in further.values() if array is not None]
                writer.add(dataset.tokens[tokens], lengths, *arrays)
                bar.update(tokens.stop - tokens.start)
        writer.finish(facts)
    return IndexedDataset(output)


def _further(dataset: IndexedDataset) -> list[str]:
    return [suffix for suffix in FURTHER if suffix in dataset.manifest["files"]]


def _require_same_text_pairs(datasets: Sequence[IndexedDataset]) -> None:
    """Raise DataError unless all datasets are text pairs of one form, or none is of text pairs."""
    forms = []
    for dataset in datasets:
        entry = dataset.manifest.get("text_pairs")
        forms.append(entry and (entry["negatives"], entry["prompts"], dataset.scores is not None))
    for dataset, form in zip(datasets, forms, strict=True):
        if form != forms[0]:
            raise DataError(
                f"datasets {datasets[0].prefix} and {dataset.prefix} are not text pairs with the same number of "
                "negatives and the same prompts, both with scores or both without; rebuild one with the options of "
                "the other."
            )


def _identity(dataset: IndexedDataset) -> dict[str, Any]:
    """What datasets must have in common to be merged. Raises DataError for one whose tokenizer is unknown."""
    if dataset.manifest.get("adopted"):
        raise DataError(
            f"dataset {dataset.prefix} was adopted, so its tokenizer is unknown and it cannot be merged; rebuild it."
        )
    fingerprint = (dataset.manifest.get("tokenizer") or {}).get("fingerprint")
    return {"fingerprint": fingerprint, **{key: dataset.manifest.get(key) for key in _SAME}}


def _merged_manifest(datasets: Sequence[IndexedDataset]) -> dict[str, Any]:
    manifests = [dataset.manifest for dataset in datasets]
    bad: dict[str, int] = {}
    for manifest in manifests:
        for problem, count in manifest.get("bad_records", {}).items():
            bad[problem] = bad.get(problem, 0) + count
    cleaning: list[Any] = []
    for record in (record for manifest in manifests for record in manifest.get("cleaning", [])):
        if record not in cleaning:
            cleaning.append(record)
    return {
        **{key: manifests[0].get(key) for key in ("eos", "documents_end_with_eos", "tokenizer")},
        **joined_entities([manifest["entities"] for manifest in manifests if "entities" in manifest]),
        **_joined_text_pairs([manifest["text_pairs"] for manifest in manifests if "text_pairs" in manifest]),
        "merged": [
            {
                "prefix": str(dataset.prefix),
                "num_documents": dataset.num_documents,
                "identity": identity(manifest["files"][".bin"]),
            }
            for dataset, manifest in zip(datasets, manifests, strict=True)
        ],
        **described_sources([source for manifest in manifests for source in sources_of(manifest)]),
        "bad_records": dict(sorted(bad.items())),
        **({"cleaning": cleaning} if cleaning else {}),
    }


def joined_entities(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry `entities` of a merged manifest from those of its datasets, whose ids are the same; {} without any."""
    if not entries:
        return {}
    mentions = {
        name: sum(entry["mentions"].get(name, 0) for entry in entries) for name in entries[0]["mentions"]
    }
    return {"entities": {**entries[0], "mentions": mentions}}


def _joined_text_pairs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry `text_pairs` of a merged manifest, with the columns of its first dataset; {} without any."""
    if not entries:
        return {}
    counts = {name: sum(entry["counts"][name] for entry in entries) for name in entries[0]["counts"]}
    return {"text_pairs": {**entries[0], "counts": counts}}


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Document lengths in tokens. `counts`: int64 [longest + 1], the number of documents of each length."""

    counts: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.counts @ np.arange(len(self.counts))) / int(self.counts.sum())

    def percentile(self, percent: float) -> int:
        """The smallest length that at least `percent` % of the documents do not exceed."""
        cumulated = np.cumsum(self.counts)
        return int(np.searchsorted(cumulated, percent / 100 * cumulated[-1]))

    def lines(self) -> list[str]:
        lengths = np.flatnonzero(self.counts)
        percentiles = ", ".join(f"{percent} %: {self.percentile(percent):,}" for percent in _PERCENTS)
        return [
            f"tokens per document: mean {self.mean:,.1f}, shortest {lengths[0]:,}, longest {lengths[-1]:,}",
            f"  percentiles {percentiles}",
        ]

    def save_histogram(self, path: str | Path, title: str) -> None:
        """Write a picture of documents, and tokens, over the length (logarithmic)."""
        from matplotlib.figure import Figure

        lengths = np.flatnonzero(self.counts)
        edges = np.unique(np.geomspace(1, lengths[-1] + 1, 60).astype(np.int64))
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for label, weights in (
            ("documents", self.counts[lengths]),
            ("tokens", self.counts[lengths] * lengths),
        ):
            heights = np.histogram(lengths, edges, weights=weights / weights.sum())[0]
            axes.stairs(100 * heights, edges, label=label, fill=label == "documents", alpha=0.7)
        axes.set(xscale="log", xlabel="tokens per document", ylabel="% of all", title=title)
        axes.legend()
        write_picture(Path(path), figure, "--histogram", dpi=120)


def length_statistics(dataset: IndexedDataset) -> LengthStatistics:
    """Read all lengths. Memory: 8 bytes for each token of the longest document."""
    chunks = range(0, dataset.num_documents, _TOKENS)
    longest = max(int(dataset.lengths[start : start + _TOKENS].max()) for start in chunks)
    shortest = min(int(dataset.lengths[start : start + _TOKENS].min()) for start in chunks)
    if shortest < 0 or longest > dataset.num_tokens:  # opening compares a sample of the index only
        wrong = shortest if shortest < 0 else longest
        raise dataset.damaged(
            ".idx", f"records a document of {wrong} tokens, but the dataset has {dataset.num_tokens}"
        )
    counts = np.zeros(longest + 1, np.int64)
    for start in chunks:
        counts += np.bincount(dataset.lengths[start : start + _TOKENS], minlength=longest + 1)
    return LengthStatistics(counts)


def token_counts(dataset: IndexedDataset) -> np.ndarray:
    """How often each id occurs, int64 [largest id + 1]. Reads all tokens."""
    counts = np.zeros(0, np.int64)
    for start in progress_bar(range(0, dataset.num_tokens, _TOKENS), desc="count", unit="chunk"):
        more = np.bincount(dataset.tokens[start : start + _TOKENS], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts
