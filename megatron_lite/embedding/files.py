"""Files of texts -> a file of their vectors, a row a text, by several processes.

The texts are cut into parts of PART_TEXTS. A worker writes the vectors of a part under a name that is a checksum of all
that they depend on: the texts, the weights, the settings. So a command that was killed takes up the parts that are
there, and parts of other texts or settings are never taken for them. Parts and batches do not depend on the number of
processes, each of which computes with one thread: the result is the same for any number, to the last bit on one type of
machine. The file is written whole or not at all.

Beside .npy is FILE.npy.hash, the hashes of the texts as datasets of text pairs have them, by which a run sees that it
has the vectors of other texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from data_utils.build.text_pairs import text_hashes
from data_utils.common.cores import usable_cores
from data_utils.common.errors import DataError
from data_utils.common.files import disk_errors, new_file, write_atomically
from data_utils.common.processes import begin_worker, submit
from data_utils.common.progress import progress_bar
from data_utils.common.settings import to_tree
from data_utils.corpus.documents import RecordCounts, read_document_files
from data_utils.corpus.inputs import expand_inputs
from data_utils.dataset.manifest import TEXT_HASHES, dataset_path
from megatron_lite.embedding.embedder import Embedder, TextFormat, width
from megatron_lite.inference.open_run import OpenRun

PART_TEXTS = 1024


@dataclass(frozen=True)
class TextFiles:
    """Texts of lines (.txt), of a field (JSON lines) or of a column (tables), in order.

    Args: inputs: files, globs and URLs. text_key: the field or column.
    """

    inputs: Sequence[str]
    text_key: str = "text"

    def count(self) -> int:
        """How many there are. Raises: DataError for records without a text, and where there is none."""
        counts = RecordCounts()
        number = sum(1 for _ in self._read(counts))
        if without := counts.blank_lines + counts.empty_documents:
            raise DataError(
                f"{without} of the records of {', '.join(self.inputs)} have no text, but each has a vector; remove "
                "them, or write a text."
            )
        if not number:
            raise DataError(f"{', '.join(self.inputs)} holds no text; give files with texts.")
        return number

    def parts(self) -> Iterator[list[str]]:
        texts = self._read(RecordCounts())
        while part := list(itertools.islice(texts, PART_TEXTS)):
            yield part

    def _read(self, counts: RecordCounts) -> Iterator[str]:
        files = expand_inputs(self.inputs)
        documents = read_document_files(files, self.text_key, "lines", "error", 0, counts)
        return (document.text for document in documents)


@dataclass(frozen=True)
class Job:
    """The vectors of texts by a run. Args: as for `Embedder` and `TextFormat`."""

    run: OpenRun
    text_format: TextFormat
    dimensions: int | None
    batch_tokens: int

    def embedder(self, device: torch.device) -> Embedder:
        return Embedder(self.run.with_model(device), self.text_format, self.dimensions, self.batch_tokens)

    def identity(self) -> bytes:
        """A checksum of all that a vector depends on besides the text, and the texts that are computed with it."""
        run = self.run
        described = {
            "weights": run.checkpoint.files,
            "model": to_tree(run.config.model),
            "tokenizer": run.tokenizer.fingerprint,
            "format": self.text_format.described(),
            "dimensions": self.dimensions,
            "batch_tokens": self.batch_tokens,
            "torch": [torch.__version__, torch.cuda.device_count() > 0],
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def embed_files(job: Job, files: TextFiles, output: Path, processes: int | None = None) -> tuple[int, int]:
    """Write the vectors: .npy, fp32 [texts, D], and the texts' hashes; or .parquet with the columns text and vector.

    Args: processes: None = a GPU each, or a core each.
    Returns: the numbers of texts and of numbers in a vector.
    Raises: DataError for bad input, or files that cannot be written.
    """
    directory = output.with_name(f".{output.name}.megatron_lite_parts")
    count, size = files.count(), width(job.run, job.dimensions)
    with disk_errors(output), new_file(output) as file:
        directory.mkdir(exist_ok=True)
        identity = job.identity()
        paths, hashes = [], []
        with progress_bar(total=count, unit="text") as bar:

            def missing() -> Iterator[tuple[Path, list[str]]]:
                for texts in files.parts():
                    hashes.append(text_hashes(texts))
                    path = directory / f"{_checksum(identity, texts)}.npy"
                    paths.append(path)
                    if path.exists():
                        bar.update(len(texts))
                    else:
                        yield path, texts

            processes = processes or torch.cuda.device_count() or usable_cores()
            processes = min(processes, -(-count // PART_TEXTS))
            for done in _compute(job, missing(), processes):
                bar.update(done)
        if output.suffix == ".npy":
            write_atomically(dataset_path(output, TEXT_HASHES), np.concatenate(hashes).tobytes())
            _write_npy(file, paths, (count, size))
        else:
            _write_parquet(file, paths, files, size)
    shutil.rmtree(directory, ignore_errors=True)
    return count, size


def _checksum(identity: bytes, texts: Sequence[str]) -> str:
    checksum = hashlib.sha256(identity)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        checksum.update(len(data).to_bytes(8, "little") + data)
    return checksum.hexdigest()


def _compute(job: Job, parts: Iterable[tuple[Path, list[str]]], processes: int) -> Iterator[int]:
    """Write the parts; yields the number of texts of each, in any order."""
    if processes == 1:
        embedder = None
        for part in parts:
            embedder = embedder or _start(job, 0)
            yield _write_part(embedder, part)
        return
    context = multiprocessing.get_context("fork")
    numbers = context.Value("i", 0)
    pool = ProcessPoolExecutor(processes, context, _start_worker, (job, numbers))
    parts = iter(parts)
    pending: set[Future[int]] = set()
    try:
        while True:
            # Few at a time: all texts need not be in memory.
            pending |= {*submit(pool, _work, itertools.islice(parts, 2 * processes - len(pending)))}
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from [each.result() for each in done]
    except BrokenProcessPool:
        raise DataError(
            "a worker process died; if memory ran out, pass fewer --processes, or lower --batch-tokens, and repeat the "
            "command."
        ) from None
    finally:
        for process in multiprocessing.active_children():
            if process.pid in (pool._processes or {}):
                process.terminate()
        pool.shutdown(cancel_futures=True)


_embedder: Embedder  # of a worker process


def _start_worker(job: Job, numbers: Any) -> None:
    global _embedder
    begin_worker()
    with numbers.get_lock():
        number = numbers.value
        numbers.value += 1
    _embedder = _start(job, number)


def use_one_thread() -> None:
    """Called before anything computes: sums depend on the number of threads, and a fork with others' waits forever."""
    torch.set_num_threads(1)


def _start(job: Job, number: int) -> Embedder:
    count = torch.cuda.device_count()
    return job.embedder(torch.device("cuda", number % count) if count else torch.device("cpu"))


def _work(part: tuple[Path, list[str]]) -> int:
    return _write_part(_embedder, part)


def _write_part(embedder: Embedder, part: tuple[Path, list[str]]) -> int:
    path, texts = part
    write_atomically(path, embedder.embed(texts).tobytes())
    return len(texts)


def _write_npy(file: IO[bytes], paths: Sequence[Path], shape: tuple[int, int]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype("<f4")), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for path in paths:
        with path.open("rb") as part:
            shutil.copyfileobj(part, file)


def _write_parquet(file: IO[bytes], paths: Sequence[Path], files: TextFiles, size: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema({"text": pa.string(), "vector": pa.list_(pa.float32(), size)})
    with contextlib.closing(parquet.ParquetWriter(file, schema)) as writer:
        for path, texts in zip(paths, files.parts(), strict=True):
            numbers = pa.array(np.fromfile(path, np.float32))
            vectors = pa.FixedSizeListArray.from_arrays(numbers, size)
            writer.write_table(pa.table([pa.array(texts), vectors], schema))
