"""How fast datasets open and how fast samples are read: huge indexes, warm and cold files, padded batches.

    python benchmarks/dataset.py --directory /some/disk [--documents 10000000 100000000] [--cold-gigabytes 6]

Four measurements, each with its yardstick in the same run:

- open: datasets of many documents (index real, tokens a sparse file) in a fresh process: seconds to open,
  then seconds and memory until the first batch of a far epoch is there, imports not counted, and the memory of the
  whole process (mapped: pages of the kernel's cache; it maps several around each page that is read);
- warm: samples per second of CPU time for shuffled windows of a cached file, beside a plain NumPy gather of
  as many tokens at random positions, which knows no documents;
- cold: samples per second of real time from a file that is not cached, read through a plain np.memmap,
  through `IndexedDataset` (no read-ahead), and with `prefetch` of the samples to come;
- examples: from cached tokens to padded blank-infilling batches, per second of CPU time.

The cold numbers depend on the disk, and on what else uses it. The files are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np

from benchmarks.arguments import check_at_least, check_places
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.tools import adopt_dataset
from data_utils.dataset.writer import IndexedDatasetWriter, index_chunks
from data_utils.loader.loader import SampleLoader
from data_utils.loader.mixture import Mixture
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary

WINDOW = 512  # tokens
BATCH = 64  # samples
DOCUMENT = 500  # tokens, mean
VOCABULARY = 50000
AHEAD = 256  # samples that are prefetched
CHUNK = 1 << 22
SPECIAL = SpecialTokens(
    cls=101, sep=102, mask=103, smask=104, gmask=105, sop=30522, eop=30523, eos=0, pad=0, unk=100, dblock=99
)


def write_sparse(prefix: Path, num_documents: int) -> None:
    """A dataset with a real index, of documents of 1 to 2 * DOCUMENT tokens, over tokens that are holes in a file."""
    dtype = np.dtype("<u2")
    lengths = np.random.default_rng(0).integers(1, 2 * DOCUMENT, num_documents, dtype=np.int32)
    with open(f"{prefix}.idx", "wb") as file:
        for piece in index_chunks(lengths, dtype):
            file.write(piece)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * dtype.itemsize)
    adopt_dataset(str(prefix))


def write_random(prefix: Path, num_tokens: int) -> None:
    """A dataset of random tokens in documents of 1 to 2 * DOCUMENT tokens."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, VOCABULARY) as writer:
        while writer.num_tokens < num_tokens:
            lengths = rng.integers(1, 2 * DOCUMENT, CHUNK // DOCUMENT)
            writer.add(rng.integers(1000, 30000, lengths.sum(), dtype=np.uint16), lengths)
        writer.finish({})


def mixture_of(prefix: Path) -> Mixture:
    return Mixture([(WindowIndex(IndexedDataset(prefix), WINDOW, 1), 1.0)], seed=1)


def cpu_rate(
    run: Callable[[int], object], samples_per_call: int, seconds: float = 0.3, rounds: int = 5
) -> float:
    """Samples per CPU second, best round."""
    run(0)
    best, number = 0.0, 1
    for _ in range(rounds):
        start, calls = time.process_time(), 0
        while (spent := time.process_time() - start) < seconds:
            run(number)
            number, calls = number + 1, calls + 1
        best = max(best, calls * samples_per_call / spent)
    return best


def measure_open(prefix: Path) -> dict:
    """In this process, which does nothing else."""
    write_random(prefix.with_name("small"), 10_000)
    mixture_of(prefix.with_name("small")).fetch(np.arange(BATCH))  # loads the compiled code
    before = resident_megabytes()
    start = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    mixture = Mixture([(WindowIndex(dataset, WINDOW, 1), 1.0)], seed=1)
    mixture.fetch(np.arange(BATCH) + 7 * mixture.indexes[0].num_windows)
    first_batch = time.perf_counter()
    after = resident_megabytes()
    return {
        "documents": len(dataset),
        "open_seconds": round(opened - start, 4),
        "first_batch_seconds": round(first_batch - start, 4),
        "more_private_megabytes": after["RssAnon"] - before["RssAnon"],
        "more_mapped_megabytes": after["RssFile"] - before["RssFile"],
        "process_rss_megabytes": sum(after[kind] for kind in ("RssAnon", "RssFile", "RssShmem")),
    }


def resident_megabytes() -> dict[str, int]:
    """Memory of this process: its own (RssAnon), and pages of files that the kernel shares and can drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith("Rss")}


def measure_warm(prefix: Path) -> dict:
    mixture = mixture_of(prefix)
    index = mixture.indexes[0]
    tokens = np.memmap(f"{prefix}.bin", "<u2", "r")
    tokens[::1024].sum()  # all pages mapped
    index.dataset.tokens[::1024].sum()
    rng = np.random.default_rng(1)
    offsets = np.arange(WINDOW)
    starts = [rng.integers(0, len(tokens) - WINDOW, BATCH)[:, None] for _ in range(1000)]
    windows = [rng.integers(0, index.num_windows, BATCH) for _ in range(1000)]
    return {
        "numpy_gather": round(cpu_rate(lambda i: tokens[starts[i % 1000] + offsets], BATCH)),
        "windows": round(cpu_rate(lambda i: index.gather(windows[i % 1000]), BATCH)),
        "shuffled_samples": round(cpu_rate(lambda i: mixture.fetch(np.arange(BATCH) + i * BATCH), BATCH)),
    }


def measure_examples(prefix: Path) -> dict:
    mixture = mixture_of(prefix)
    objective = BlankInfilling(BlankInfillingConfig(), Vocabulary(SPECIAL, 3000), 1, WINDOW)
    loader = SampleLoader(mixture, objective)
    out = loader.batch(np.arange(BATCH))
    return {
        "one_buffer": round(cpu_rate(lambda i: loader.batch(np.arange(BATCH) + i * BATCH, out), BATCH)),
        "new_arrays": round(cpu_rate(lambda i: loader.batch(np.arange(BATCH) + i * BATCH), BATCH)),
    }


def forget(prefix: Path) -> None:
    """Drop the files from the page cache."""
    for suffix in (".bin", ".idx"):
        descriptor = os.open(f"{prefix}{suffix}", os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rate(read: Callable[[int], object], samples_per_call: int, seconds: float) -> float:
    """Samples per real second."""
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds:
        read(calls)
        calls += 1
    return calls * samples_per_call / spent


class PlainReader:
    """One window after the other from a plain memory map."""

    def __init__(self, prefix: Path, starts: np.ndarray) -> None:
        self.tokens = np.memmap(f"{prefix}.bin", "<u2", "r")
        self.starts = starts.tolist()

    def __call__(self, number: int) -> np.ndarray:
        start = self.starts[number % len(self.starts)]
        return self.tokens[start : start + WINDOW].astype(np.int32)


def measure_cold(prefix: Path, seconds: float) -> dict:
    """Each reader starts with nothing in the cache, and reads other offsets than the one before."""
    mixture = mixture_of(prefix)
    num_windows = mixture.indexes[0].num_windows
    del mixture
    rng = np.random.default_rng(2)
    results = {}

    forget(prefix)
    starts = rng.integers(0, num_windows - 1, 1 << 20) * WINDOW
    results["plain_memmap"] = round(rate(PlainReader(prefix, starts), 1, seconds))

    for name, ahead in (("no_read_ahead", 0), ("prefetch", AHEAD)):
        forget(prefix)
        mixture = mixture_of(prefix)
        epoch = (5 + ahead) * num_windows

        def batch(number: int, mixture: Mixture = mixture, ahead: int = ahead, epoch: int = epoch) -> None:
            indices = epoch + np.arange(BATCH) + number * BATCH
            if ahead and not number:
                mixture.prefetch(epoch + np.arange(ahead))
            if ahead:
                mixture.prefetch(indices + ahead)
            mixture.fetch(indices)

        results[name] = round(rate(batch, BATCH, seconds))
        del mixture, batch
    return results


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the files are made (default: the system's)")
    parser.add_argument("--documents", type=int, nargs="*", default=[10_000_000, 100_000_000])
    parser.add_argument("--warm-megabytes", type=int, default=200)
    parser.add_argument("--cold-gigabytes", type=float, default=6.0, help="0: no cold measurement")
    parser.add_argument(
        "--cold-seconds",
        type=float,
        default=1.0,
        help="for each reader; longer, and read-ahead has cached the file",
    )
    parser.add_argument("--open", help=argparse.SUPPRESS)  # what the fresh processes run
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "documents", "warm_megabytes")
    check_at_least(arguments, 0, "cold_gigabytes", "cold_seconds")
    check_places(arguments.directory)
    if arguments.open:
        print(json.dumps(measure_open(Path(arguments.open))))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        prefix = Path(directory) / "d"
        for num_documents in arguments.documents:
            write_sparse(prefix, num_documents)
            command = [sys.executable, __file__, "--open", str(prefix)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print("open", done.stdout.strip(), flush=True)
        prefix = Path(directory) / "w"
        write_random(prefix, arguments.warm_megabytes * 500_000)
        warm = measure_warm(prefix)
        print(
            "warm", json.dumps(warm), f"{warm['shuffled_samples'] / warm['numpy_gather']:.0%} of the gather"
        )
        print("examples", json.dumps(measure_examples(prefix)), flush=True)
        if arguments.cold_gigabytes:
            prefix = Path(directory) / "c"
            write_random(prefix, int(arguments.cold_gigabytes * 500_000_000))
            cold = measure_cold(prefix, arguments.cold_seconds)
            print("cold", json.dumps(cold), f"{cold['prefetch'] / cold['plain_memmap']:.1f}x plain memmap")
    return 0


if __name__ == "__main__":
    run_command(main)
