"""Groups of near-duplicates in the report: the largest, and the text that stayed in place of a removed one.

datatrove joins pairs to groups, and writes the number of each document's group. Then `FindGroups` chooses the documents
that the report shows, and `ShowGroups`, where the output is written, keeps the beginnings of their texts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_utils.cleaning.counts import EXAMPLES, CountFile, example

_HELD_OUT = (1 << 32) - 1  # datatrove's number of the task of a document that stands for all held-out texts
_TYPE = "🫂 - DEDUP"


class FindGroups(PipelineStep):
    """Finds the largest groups, and those of the first removed documents, which are the examples."""

    type = _TYPE
    name = "find groups"

    def __init__(self, clusters: str, groups: CountFile) -> None:
        super().__init__()
        self.clusters, self.groups = Path(clusters), groups

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        files = sorted(self.clusters.glob("*.clusters"), key=lambda path: int(path.stem))
        # Of each document: its task, its position, its group, and whether it is removed.
        members = np.concatenate([np.empty((0, 4), np.int64), *map(_members, files)])
        groups, is_removed, is_held_out = members[:, 2], members[:, 3] == 1, members[:, 0] == _HELD_OUT
        sizes = np.bincount(groups[~is_held_out])
        largest = np.argsort(-sizes, kind="stable")[:EXAMPLES]
        is_example = is_removed & (is_removed.cumsum() <= EXAMPLES)
        has_stayed = ~is_removed & ~is_held_out & np.isin(groups, [*largest, *groups[is_example]])
        counts = {
            "largest": [[group, int(sizes[group])] for group in largest.tolist()],
            "held_out": groups[is_held_out].tolist(),
            "places": members[is_example | has_stayed].tolist(),
        }
        self.groups.write(rank, counts)


def _members(path: Path) -> np.ndarray:
    """The documents of a task that are in groups, int64 [documents, 4]."""
    positions, groups = np.fromfile(path, "<u4").astype(np.int64).reshape(-1, 2).T
    removed = path.with_suffix(".remove")
    is_removed = np.isin(positions, np.fromfile(removed, "<u4") if removed.exists() else [])
    return np.stack([np.full(len(groups), int(path.stem)), positions, groups, is_removed], 1)


class ShowGroups(PipelineStep):
    """Marks the documents that `FindGroups` chose with their group, and keeps those that stay. Changes nothing else."""

    type = _TYPE
    name = "show groups"

    def __init__(self, groups: CountFile, stayed: CountFile) -> None:
        super().__init__()
        self.groups, self.stayed = groups, stayed

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        (groups,) = self.groups.read()
        chosen = {place[1]: place[2:] for place in groups["places"] if place[0] == rank}
        stayed = {}
        for position, document in enumerate(data):
            if position in chosen:
                document.metadata["group"], is_removed = chosen[position]
                if not is_removed:
                    stayed[document.metadata["group"]] = example(document.text, document.metadata)
            yield document
        self.stayed.write(rank, stayed)
