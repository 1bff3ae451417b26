"""What several tests use around indexed dataset."""

from __future__ import annotations

import numpy as np

from data_utils.dataset.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
)


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
