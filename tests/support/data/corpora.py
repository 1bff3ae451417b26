"""Corpora from texts and datasets from token ids, small enough to look at every byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.data.byte_tokenizer import ByteTokenizer

from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter


def to_jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def write_corpus(path, texts):
    path.write_text(to_jsonl(texts))
    return str(path)


def make(tmp_path, texts, make_tokenizer=ByteTokenizer, name="corpus", **options):
    path = str(tmp_path / "input.jsonl")
    if not Path(path).exists() or Path(path).read_text() != to_jsonl(texts):
        write_corpus(Path(path), texts)
    options.setdefault("shard_bytes", 500)
    config = BuildConfig(inputs=[path], output=str(tmp_path / "out" / name), **options)
    return build_corpus(config, make_tokenizer)


def texts_of(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset.document(i)[:-1].tolist()).decode() for i in range(len(dataset))]


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def build(prefix, documents, vocab_size=1000, **manifest):
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.asarray(document, np.int32), np.array([len(document)]))
        writer.finish(manifest)
    return IndexedDataset(prefix)


def damage(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
