#!/usr/bin/env python3
"""What a build of many small inputs costs: files on a disk, and the same files as objects of a store.

    python benchmarks/small_files.py --work DIR [--files 100000] [--objects 10000] [--workers 2]

The files have 150 bytes and lie in folders of 1,000, half of them .txt and half JSON lines; the tokenizer is a
byte-level BPE of 600 tokens. A stand-in of S3 on the loopback, in this process, serves the objects: it knows what a
build asks, counts it, and answers at once, so that work is measured and not waiting. Each line is a whole run of
scripts/preprocess_data.py: CPU seconds of all its processes, wall seconds, peak memory. The dataset of the objects must
have the bytes of one that is built from the same files on the disk: exit status 1 if it has not.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import string
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import orjson
from tqdm import tqdm

from benchmarks.arguments import check_at_least, write_json
from benchmarks.preprocess import ROOT, Run
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.files import require_writable

SIZE, FOLDER = 150, 1000  # bytes of a file, files of a folder
BUCKET = "bucket"
PAGE = 1000  # objects of a page of a listing, as S3's
CHANGED = formatdate(0, usegmt=True)


def name_of(number: int) -> str:
    return f"{number // FOLDER:05d}/{number:08d}{'.txt' if number % 2 else '.jsonl'}"


def write_files(directory: Path, count: int) -> None:
    """Make the directory anew, with files number 0 to count - 1."""
    shutil.rmtree(directory, ignore_errors=True)
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(2000)]
    for number in tqdm(range(count), desc=directory.name, disable=None):
        text = " ".join(draw.choices(words, k=SIZE // 3))
        path = directory / name_of(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            f"{text[: SIZE - 1]}\n".encode()
            if number % 2
            else orjson.dumps({"text": text[: SIZE - 12]}) + b"\n"
        )


class Store:
    """A stand-in of S3 with one bucket: a directory's files. It answers what a build asks, and nothing else."""

    def __init__(self, directory: Path, count: int):
        self.directory = directory
        self.keys = [f"{directory.name}/{name_of(number)}" for number in range(count)]  # in their order
        self.known = set(self.keys)
        self.requests: Counter[str] = Counter()
        self.port = 0
        started = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._serve(started),), daemon=True).start()
        started.wait()

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    async def _serve(self, started: threading.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests["connections"] += 1
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                method, target, _ = first.split(" ")
                fields = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
                status, body, more = self.answer(method, target, fields.get("range"))
                head = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {len(body)}", *more]
                data = "\r\n".join(head).encode() + b"\r\n\r\n"
                writer.write(data if method == "HEAD" else data + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def answer(self, method: str, target: str, byte_range: str | None) -> tuple[HTTPStatus, bytes, list[str]]:
        """Status, body and header lines. Args: target: /BUCKET/KEY, or /BUCKET?... for a listing."""
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        self.requests[method if key else "listings"] += 1
        if method not in ("GET", "HEAD") or bucket != BUCKET or (key and key not in self.known):
            return HTTPStatus.NOT_FOUND, b"", []
        if not key:
            return HTTPStatus.OK, self.listing(parse_qs(parts.query)) if method == "GET" else b"", []
        body = self.path(key).read_bytes()
        lines = [f'ETag: "{zlib.crc32(body):x}"', f"Last-Modified: {CHANGED}"]
        if byte_range is None:
            return HTTPStatus.OK, body, lines
        start, last = map(int, byte_range.removeprefix("bytes=").split("-"))
        lines.append(f"Content-Range: bytes {start}-{min(last, len(body) - 1)}/{len(body)}")
        return HTTPStatus.PARTIAL_CONTENT, body[start : last + 1], lines

    def path(self, key: str) -> Path:
        return self.directory.parent / key

    def listing(self, query: dict[str, list[str]]) -> bytes:
        """A page of ListObjectsV2; a continuation token is the number of its first object."""
        prefix, start = query.get("prefix", [""])[0], int(query.get("continuation-token", ["0"])[0])
        stop = start + PAGE
        rows = "".join(
            f"<Contents><Key>{key}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{self.path(key).stat().st_size}</Size></Contents>"
            for key in self.keys[start:stop]
            if key.startswith(prefix)
        )
        more = stop < len(self.keys)
        token = f"<NextContinuationToken>{stop}</NextContinuationToken>" if more else ""
        return (
            f"<?xml version='1.0'?><ListBucketResult><Name>{BUCKET}</Name><IsTruncated>{str(more).lower()}"
            f"</IsTruncated>{token}{rows}</ListBucketResult>"
        ).encode()


class Builds:
    """Whole builds below a directory."""

    def __init__(self, work: Path, workers: int):
        self.work, self.workers, self.tokenizer = work, workers, work / "tokenizer/tokenizer.json"
        self.rows: dict[str, dict[str, float]] = {}

    def train_tokenizer(self, text: str) -> None:
        command = [sys.executable, str(ROOT / "scripts/train_tokenizer.py"), "--kind", "byte_bpe"]
        Run([*command, "--vocab-size", "600", "--input", text, "--output", str(self.tokenizer.parent)])

    def build(self, name: str, given: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, str(ROOT / "scripts/preprocess_data.py"), "--input", given, "--overwrite"]
        command += ["--output", str(self.work / "datasets" / name), "--workers", str(self.workers)]
        run = Run(
            [*command, "--tokenizer-kind", "hf_json", "--tokenizer-path", str(self.tokenizer)], environment
        )
        self.rows[name] = {
            "cpu_seconds": run.cpu_seconds,
            "seconds": run.seconds,
            "peak_bytes": run.peak_bytes,
        }

    def equal(self, name: str, other: str) -> bool:
        paths = [[self.work / "datasets" / f"{x}{end}" for end in (".bin", ".idx")] for x in (name, other)]
        return all(a.read_bytes() == b.read_bytes() for a, b in zip(*paths, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory of files and datasets: 4 KB of disk for a file")
    add("--files", type=int, default=100_000, help="files on the disk (default: 100000)")
    add("--objects", type=int, default=10_000, help="objects of the store (default: 10000)")
    add("--workers", type=int, default=2, help="processes of a build (default: 2)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "files", "objects", "workers")
    require_writable(options.work / "file", "--work")
    if options.json is not None:
        require_writable(options.json, "--json")
    work = options.work.resolve()
    files, objects = work / "files", work / "objects"
    write_files(files, options.files)
    write_files(objects, options.objects)
    builds, store = Builds(work, options.workers), Store(objects, options.objects)
    builds.train_tokenizer(f"{files}/00000/*")
    builds.build("files", f"{files}/*/*")
    builds.build("same_files", f"{objects}/*/*")
    builds.build("objects", f"s3://{BUCKET}/{objects.name}/", store.environment())
    print("| build | CPU s | s | peak MB |\n|---|---|---|---|")
    for name, count in (
        ("files", options.files),
        ("same_files", options.objects),
        ("objects", options.objects),
    ):
        row = builds.rows[name]
        kind = "objects" if name == "objects" else "files"
        print(
            f"| {count:,} {kind} | {row['cpu_seconds']:.1f} | {row['seconds']:.1f} | {row['peak_bytes'] / 1e6:.0f} |"
        )
    equal = builds.equal("objects", "same_files")
    print(
        f"requests: {dict(store.requests)}; the objects' dataset {'equals' if equal else 'DIFFERS FROM'} the files'"
    )
    if options.json is not None:
        sizes = {name: getattr(options, name) for name in ("files", "objects", "workers")}
        write_json(options.json, {**sizes, "builds": builds.rows, "requests": store.requests, "equal": equal})
    return int(not equal)


if __name__ == "__main__":
    run_command(main)
