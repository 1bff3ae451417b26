"""A small corpus with a file of each format that a build reads, and builds of it."""

import bz2
import gzip
import io
import json
import lzma

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard
from support.data.byte_tokenizer import ByteTokenizer

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus

NAMES = (
    "a.jsonl",
    "b.jsonl.gz",
    "c.jsonl.zst",
    "d.txt",
    "e.csv",
    "f.parquet",
    "g.arrow",
    "h.jsonl.bz2",
    "i.txt.xz",
)


def lines(name, count):
    return "".join(
        json.dumps({"text": f"{name} {i} " + "héllo wörld " * (i % 40)}) + "\n" for i in range(count)
    ).encode()


def corpus_files(count=300):
    """name -> content."""
    table = pyarrow.table({"text": [f"row {i} " * 20 for i in range(count)], "other": list(range(count))})
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet, row_group_size=100)
    with pyarrow.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return {
        "a.jsonl": lines("a", count * 4),
        "b.jsonl.gz": gzip.compress(lines("b", count)),
        "c.jsonl.zst": zstandard.compress(lines("c", count)),
        "d.txt": "\n\n".join(f"paragraph {i} " * 9 for i in range(count)).encode(),
        "e.csv": (
            "id,text\n" + "".join(f'{i},"text, {i} ""quoted"" {"x" * (i % 90)}"\n' for i in range(count))
        ).encode(),
        "f.parquet": parquet.getvalue(),
        "g.arrow": arrow.getvalue(),
        "h.jsonl.bz2": bz2.compress(lines("h", count)),
        "i.txt.xz": lzma.compress(f"{'one text of a file. ' * count}".encode()),
    }


def write_files(directory, files):
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [str(directory / name) for name in files]


def build(inputs, output, **options):
    """The bytes of the dataset: .bin and .idx."""
    options = {"shard_bytes": 30_000, "text_split": "blank_lines", **options}
    build_corpus(BuildConfig(inputs=list(map(str, inputs)), output=str(output), **options), ByteTokenizer)
    return dataset_bytes(output)


def dataset_bytes(prefix):
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]
