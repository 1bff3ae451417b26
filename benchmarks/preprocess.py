#!/usr/bin/env python3
"""How fast text becomes a token dataset: whole runs of scripts/preprocess_data.py compared with the libraries.

    python benchmarks/preprocess.py --work DIR [--megabytes 200] [--json]

The text is real: documentation and dictionaries from Debian packages, fetched with `apt-get download` into
DIR/packages (or put there by hand), unpacked, freed of markup, cut into documents and shuffled. Tokenizers
of 30,000 pieces are trained on a part of it unless --bpe, --wordpiece or --sentencepiece names one.

Each line is one whole run, start-up, reading and writing included, on --workers processes. Yardsticks, in
processes of their own on the first --yardstick-megabytes of the same documents:

- tokenizers: one process that reads JSON lines, encodes with the `tokenizers` library on one core and writes
  ids, start-up included;
- sentencepiece: the library alone with --workers threads, only the time inside `encode`;
- for BPE also tiktoken, one process that does the same as the first, and datatrove's Megatron tokenizer, a whole run
  on --workers tasks (both are in requirements-dev.txt; without them their lines are left out).

Every id of the yardstick's documents is compared with the dataset. Wall time is what a user waits for. The
CPU columns say more about large corpora, and on a machine that others use as well: megabytes per CPU second
beyond the yardstick's part, in one process, so without start-up; the same of the library's `encode` alone;
and the ratio that follows if all --workers cores are free. Memory is the peak of the whole process tree,
pages shared between processes counted once. Compilation happens once per machine and is reported apart.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import html
import importlib.util
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import orjson
import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from tqdm import tqdm

from benchmarks.arguments import check_at_least
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_writable
from data_utils.tokenizers.byte_symbols import byte_symbols

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "english": (
        *("python3.11-doc", "dict-gcide", "perl-doc", "dict-wn", "postgresql-doc-15", "manpages-dev"),
        *("dict-foldoc", "openjdk-17-doc", "linux-doc-6.1"),
    ),
    "chinese": ("debian-reference-zh-cn", "manpages-zh", "libreoffice-help-zh-cn"),
}
# Family: (kind of the tokenizer, file).
FAMILIES = {
    "bpe": ("hf_json", "tokenizer.json"),
    "wordpiece": ("bert_wordpiece", "vocab.txt"),
    "sentencepiece": ("sentencepiece", "tokenizer.model"),
}
TARGETS = {  # times the yardstick
    ("bpe", "english"): 35.0,
    ("wordpiece", "english"): 15.0,
    ("wordpiece", "chinese"): 5.0,
    ("sentencepiece", "english"): 0.85,
    ("sentencepiece", "chinese"): 0.85,
}
VOCABULARY = 30_000
TRAINING_BYTES = 6_000_000
DOCUMENT_CHARACTERS = 4_000  # a file is cut at the next empty line after so many
TEXT_SUFFIXES = (".html", ".htm", ".txt", ".pod", ".rst", ".dict.dz", ".xhp")
MAN_PAGE = re.compile(r"\.\d[a-z]*(\.gz)?$")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_SECONDS = 0.2  # reading the memory of a process takes milliseconds


# ---- the text ----


def corpus(work: Path, language: str, megabytes: float) -> Path:
    """JSON lines of about `megabytes` of text; made once."""
    path = work / f"{language}-{megabytes:g}.jsonl"
    if path.exists():
        return path
    wanted = int(megabytes * 1e6)
    documents: list[str] = []
    size, names = 0, PACKAGES[language]
    for i, name in enumerate(tqdm(names, desc=f"{language} packages", disable=None)):
        # A package may fill half of what is missing, the last one all of it: variety in small corpora.
        share = wanted if i == len(names) - 1 else size + (wanted - size) // 2
        for document in package_documents(work, name):
            if size >= share:
                break
            documents.append(document)
            size += len(document.encode())
    random.Random(0).shuffle(documents)  # so that the head resembles the whole
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.writelines(orjson.dumps({"text": document}) + b"\n" for document in documents)
    partial.rename(path)
    return path


def package_documents(work: Path, name: str) -> Iterator[str]:
    root = unpacked(work, name)
    for path in sorted(root.rglob("*")):
        is_man = "/man/" in str(path) and MAN_PAGE.search(path.name)
        is_text = path.name.removesuffix(".gz").endswith(TEXT_SUFFIXES)
        if path.is_symlink() or not path.is_file() or not (is_man or is_text):
            continue
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        text = data.decode("utf-8", "replace")
        text = from_man(text) if is_man else from_html(text) if "htm" in path.name else text
        yield from documents_of(text)


def unpacked(work: Path, name: str) -> Path:
    root = work / "unpacked" / name
    if root.exists():
        return root
    packages = work / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    if not list(packages.glob(f"{name}_*.deb")):
        run_quietly(["apt-get", "download", name], packages, f"put the .deb of {name} into {packages}")
    (archive, *_) = sorted(packages.glob(f"{name}_*.deb"))
    partial = root.with_name(f"{name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    run_quietly(["dpkg-deb", "-x", str(archive), str(partial)], work, f"remove {archive} and try again")
    partial.rename(root)
    return root


def run_quietly(command: Sequence[str], directory: Path, remedy: str) -> None:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    except OSError as error:
        raise DataError(f"{command[0]}: {error.strerror}; {remedy}.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"{' '.join(command[:3])} failed ({reason}); {remedy}.")


def from_html(text: str) -> str:
    text = re.sub(r"(?is)<(script|style)\b.*?</\1>", " ", text)
    text = html.unescape(re.sub(r"(?s)<[^>]*>", "", text))
    return re.sub(r"\n\s*\n", "\n\n", text)


def from_man(text: str) -> str:
    text = re.sub(r"(?m)^[.'](\\\".*|[A-Za-z]+ ?)", "", text)
    return re.sub(r"\\(f.|[&-])", lambda match: "-" if match[1] == "-" else "", text)


def documents_of(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + DOCUMENT_CHARACTERS)
        if end < 0 or end > start + 10 * DOCUMENT_CHARACTERS:
            end = start + 10 * DOCUMENT_CHARACTERS
        if document := text[start:end].strip("\n"):
            yield document
        start = end


def head(path: Path, megabytes: float) -> tuple[Path, int]:
    """The first documents of a corpus as a file of their own, and their bytes of text."""
    shorter = path.with_suffix(f".head-{megabytes:g}.jsonl")
    size = 0
    with path.open("rb") as source, shorter.open("wb") as target:
        for line in source:
            target.write(line)
            size += len(orjson.loads(line)["text"].encode())
            if size >= megabytes * 1e6:
                break
    return shorter, size


def bytes_of_text(path: Path) -> int:
    with path.open("rb") as file:
        return sum(len(orjson.loads(line)["text"].encode()) for line in file)


# ---- runs ----


class Run:
    """One command: wall and CPU seconds, peak memory of its process tree, standard output."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None):
        adopt_orphans()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        self.peak_bytes = 0
        watcher = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watcher.start()
        self.output, errors = process.communicate()
        self.seconds = time.perf_counter() - start
        watcher.join()
        wait_for_orphans()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if process.returncode:
            reason = (errors.strip().splitlines() or ["no message"])[-1]
            raise DataError(f"{' '.join(command[1:3])} ended with status {process.returncode}: {reason}")

    def _watch(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, tree_bytes(process.pid))
            time.sleep(POLL_SECONDS)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends before them.

    The fork server of multiprocessing ends after the command that started it, and the times of its workers would be
    lost with it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def wait_for_orphans() -> None:
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-1, 0)


def tree_bytes(pid: int) -> int:
    """Memory of a process and its descendants; a page of several processes counts once (PSS)."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return 0
    own = sum(int(size) for size in re.findall(r"(?m)^Pss: +(\d+) kB", rollup)) * 1024
    return own + sum(tree_bytes(int(child)) for child in " ".join(children).split())


def preprocess(path: Path, output: Path, family: str, tokenizer: Path, workers: int) -> Run:
    return Run(
        [
            *(sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), "--input", str(path)),
            *("--output", str(output), "--overwrite", "--workers", str(workers)),
            *("--tokenizer-kind", FAMILIES[family][0], "--tokenizer-path", str(tokenizer)),
        ]
    )


def train(work: Path, family: str, inputs: Sequence[Path]) -> Path:
    """A tokenizer of the family, trained on the heads of all corpora; made once."""
    kind, name = FAMILIES[family]
    if not (work / family / name).exists():
        command = [sys.executable, str(ROOT / "scripts" / "train_tokenizer.py"), "--kind", kind]
        command += ["--input", *map(str, inputs), "--vocab-size", str(VOCABULARY)]
        Run([*command, "--output", str(work / family)])
    return work / family / name


# ---- yardsticks: run in a process of their own ----


def yardstick(family: str, tokenizer: Path, path: Path, output: Path, threads: int) -> int:
    """Encode with the library, save the ids, print the wall and CPU seconds that the encoding took."""
    seconds, cpu_seconds, rows = 0.0, 0.0, []
    encode = library(family, tokenizer, threads)
    with path.open("rb") as file:
        while lines := list(itertools.islice(file, 1000)):
            texts = [orjson.loads(line)["text"] for line in lines]
            start, cpu_start = time.perf_counter(), time.process_time()
            encoded = encode(texts)
            seconds += time.perf_counter() - start
            cpu_seconds += time.process_time() - cpu_start
            rows += [np.array(row, np.int32) for row in encoded]
    np.savez(output, ids=np.concatenate(rows), lengths=np.array([len(row) for row in rows]))
    print(seconds, cpu_seconds)
    return 0


def tiktoken_encode(path: Path):
    """tiktoken's encode function for the byte-level BPE of a tokenizer.json."""
    import tiktoken

    tree = orjson.loads(path.read_bytes())
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    special = {token["content"] for token in tree["added_tokens"]}
    ranks = {
        bytes(byte_of[symbol] for symbol in text): number
        for text, number in tree["model"]["vocab"].items()
        if text not in special
    }
    # GPT-2's pattern: contractions, letters, digits, other characters, each with at most a space before; white space.
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    encoding = tiktoken.Encoding("ours", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda texts: [encoding.encode_ordinary(text) for text in texts]


def datatrove(tokenizer: Path, path: Path, output: Path, workers: int) -> int:
    """A whole run of datatrove over the file, split into one part per worker."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    parts = output.with_suffix(".parts")
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    lines = path.read_bytes().splitlines(keepends=True)
    for worker in range(workers):
        (parts / f"{worker}.jsonl").write_bytes(b"".join(lines[worker::workers]))
    eos = orjson.loads(tokenizer.read_bytes())["added_tokens"][0]["content"]
    pipeline = [
        JsonlReader(str(parts), glob_pattern="*.jsonl"),
        MegatronDocumentTokenizer(
            str(parts / "tokens"), tokenizer_name_or_path=str(tokenizer), eos_token=eos
        ),
    ]
    start = time.perf_counter()
    executor = LocalPipelineExecutor(
        pipeline, tasks=workers, workers=workers, logging_dir=str(parts / "logs")
    )
    executor.run()
    print(time.perf_counter() - start, 0.0)
    return 0


def library(family: str, path: Path, threads: int):
    """The plain library's encode function for a list of texts."""
    if family == "tiktoken":
        return tiktoken_encode(path)
    if family == "sentencepiece":
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return lambda texts: model.encode(texts, num_threads=threads)
    if family == "bpe":
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.encode_special_tokens = True
    else:
        backend = tokenizers.Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return lambda texts: [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]


def equal_documents(dataset_prefix: Path, ids_path: Path) -> tuple[int, int]:
    """How many of the yardstick's documents, and of how many, have the same ids in the dataset."""
    from data_utils.dataset.indexed_dataset import (
        IndexedDataset,  # not above: yardsticks would pay for numba too
    )

    dataset = IndexedDataset(dataset_prefix)
    expected = np.load(ids_path)
    ends = np.cumsum(expected["lengths"])
    rows = [
        row for row in np.split(expected["ids"], ends[:-1]) if len(row)
    ]  # documents without ids are left out
    equal = sum(np.array_equal(dataset.document(i)[:-1], row) for i, row in enumerate(rows))
    return equal, len(rows)


# ---- the table ----


def peers(tokenizer: Path, path: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """A line about each other tool for byte-level BPE that is installed."""
    shorter, head_bytes = head(path, arguments.yardstick_megabytes)
    for name in ("tiktoken", "datatrove"):
        if importlib.util.find_spec(name) is None:
            yield f"{name}: not installed"
            continue
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--work",
            arguments.work,
            "--yardstick",
            name,
        ]
        command += ["--tokenizer", str(tokenizer), "--input", str(shorter)]
        command += [
            "--output",
            str(Path(arguments.work) / f"{name}.npz"),
            "--workers",
            str(arguments.workers),
        ]
        run = Run(command, {"TOKENIZERS_PARALLELISM": "false"})
        rate, peak = head_bytes / 1e6 / run.seconds, round(run.peak_bytes / 1e6)
        yield f"{name}: {rate:.2f} MB/s of a whole run on {head_bytes / 1e6:.0f} MB, peak {peak} MB"


def measure(family: str, language: str, path: Path, arguments: argparse.Namespace) -> dict:
    """One line of the table."""
    work, workers = Path(arguments.work), arguments.workers
    tokenizer = Path(getattr(arguments, family))
    shorter, head_bytes = head(path, arguments.yardstick_megabytes)
    text_bytes = bytes_of_text(path)
    output, ids = work / "dataset", work / "yardstick.npz"
    command = [sys.executable, str(Path(__file__).resolve()), "--work", str(work), "--yardstick", family]
    command += ["--tokenizer", str(tokenizer), "--input", str(shorter), "--output", str(ids)]
    command += ["--workers", str(workers)]
    alone = Run(command, {"TOKENIZERS_PARALLELISM": "false"})
    encode_seconds, encode_cpu_seconds = map(float, alone.output.split())
    library_seconds = encode_seconds if family == "sentencepiece" else alone.seconds
    library_cores = workers if family == "sentencepiece" else 1
    ours = preprocess(path, output, family, tokenizer, workers)
    equal, compared = equal_documents(output, ids)
    rate, library_rate = text_bytes / 1e6 / ours.seconds, head_bytes / 1e6 / library_seconds
    # The difference of two runs of one process knows no start-up.
    further = (text_bytes - head_bytes) / 1e6
    cpu_seconds = [preprocess(part, output, family, tokenizer, 1).cpu_seconds for part in (shorter, path)]
    cpu_rate = (
        further / (cpu_seconds[1] - cpu_seconds[0]) if cpu_seconds[1] > cpu_seconds[0] else float("nan")
    )
    library_cpu_rate = head_bytes / 1e6 / encode_cpu_seconds
    return {
        "family": family,
        "language": language,
        "megabytes": round(text_bytes / 1e6, 1),
        "megabytes_per_second": round(rate, 2),
        "library_megabytes_per_second": round(library_rate, 2),
        "ratio": round(rate / library_rate, 2),
        "cpu_megabytes_per_second": round(cpu_rate, 2),
        "library_cpu_megabytes_per_second": round(library_cpu_rate, 2),
        "cpu_ratio": round(cpu_rate * workers / (library_cpu_rate * library_cores), 2),
        "target": TARGETS.get((family, language)),
        "peak_megabytes": round(ours.peak_bytes / 1e6),
        "library_peak_megabytes": round(alone.peak_bytes / 1e6),
        "equal_documents": equal,
        "compared_documents": compared,
    }


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--work",
        required=True,
        help="directory for packages, corpora and datasets (several times --megabytes)",
    )
    add(
        "--megabytes",
        type=float,
        default=200,
        help="text per language, if the packages hold it (default: 200)",
    )
    add("--yardstick-megabytes", type=float, default=20, help="of it for the libraries (default: 20)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(default: all)")
    add("--languages", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="(default: all)")
    for family, (_, name) in FAMILIES.items():
        add(f"--{family}", metavar=name, help="use this tokenizer instead of training one")
    add("--json", action="store_true", help="also print the results as one JSON line")
    for name in ("--yardstick", "--tokenizer", "--input", "--output"):
        add(name, help=argparse.SUPPRESS)  # of the processes that this one starts
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.yardstick:
        files = Path(arguments.tokenizer), Path(arguments.input), Path(arguments.output)
        if arguments.yardstick == "datatrove":
            return datatrove(*files, arguments.workers)
        return yardstick(arguments.yardstick, *files, arguments.workers)
    check_at_least(arguments, 1, "megabytes", "yardstick_megabytes", "workers")
    require_writable(Path(arguments.work) / "corpus", "--work")
    work = Path(arguments.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    paths = {name: corpus(work, name, arguments.megabytes) for name in arguments.languages}
    results, notes = [], []
    for family in arguments.families:
        if getattr(arguments, family) is None:
            samples = [head(path, TRAINING_BYTES / 1e6)[0] for path in paths.values()]
            setattr(arguments, family, train(work, family, samples))
        # Compiles what has not been compiled on this machine; the later runs find it in the cache.
        sample = head(next(iter(paths.values())), 1)[0]
        first = preprocess(sample, work / "dataset", family, Path(getattr(arguments, family)), 1)
        print(f"{family}: first run of 1 MB {first.seconds:.1f} s")
        results += [measure(family, language, path, arguments) for language, path in paths.items()]
        if family == "bpe":
            notes = list(peers(Path(arguments.bpe), next(iter(paths.values())), arguments))
    print_table(results, arguments)
    print("\n".join(notes))
    if arguments.json:
        print(json.dumps(results))
    return 0


COLUMNS = {
    "family": "",
    "language": "",
    "megabytes": "MB",
    "megabytes_per_second": "MB/s",
    "library_megabytes_per_second": "library",
    "ratio": "ratio",
    "cpu_megabytes_per_second": "MB/CPU s",
    "library_cpu_megabytes_per_second": "library",
    "cpu_ratio": "ratio",
    "target": "target",
    "peak_megabytes": "peak MB",
    "equal_documents": "equal",
    "compared_documents": "of",
}


def print_table(results: Sequence[dict], arguments: argparse.Namespace) -> None:
    print(f"\n{arguments.workers} processes: MB/s of whole runs, then per CPU second beyond the start")
    rows = [list(COLUMNS.values()), *([str(line[key] or "-") for key in COLUMNS] for line in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    run_command(main)
