"""The last steps of pipelines: clean text as JSON lines, and what becomes of removed documents and parts of documents.

datatrove gives each document that a filter removes to the filter's `exclusion_writer`. Ours keeps counts and ten
examples of each rule: all that is removed from a crawl is as large as the crawl.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.writers import JsonlWriter

from data_utils.cleaning.counts import CountFile, Rule
from data_utils.corpus.documents import text_bytes


class RemovedDocuments:
    """An `exclusion_writer` that counts. A document's rule is the filter's name, with its reason if it gives one."""

    def __init__(self, name: str, counts: CountFile) -> None:
        self.name, self.counts = name, counts
        self._rules: dict[str, Rule] = {}
        self._task: int | None = None

    def __enter__(self) -> RemovedDocuments:
        self._rules, self._task = {}, None
        return self

    def write(self, document: Document, rank: int = 0) -> None:
        reason = document.metadata.get("filter_reason")
        rule = f"{self.name}: {reason}" if reason else self.name
        self._rules.setdefault(rule, Rule()).add(document.text, document.metadata)
        self._task = rank

    def cut(self, document: Document, reason: str, part: str, size: int) -> None:
        """Count a part of a document that stays; see `Rule.cut`."""
        self._rules.setdefault(f"{self.name}: {reason}", Rule()).cut(part, size, document.metadata)
        self._task = document.metadata["task"]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._task is not None:
            self.counts.write(self._task, self._rules)


class CleanText(JsonlWriter):
    """Writes the output, FOLDER/00017.jsonl of task 17: the text and the recipe's fields of each document.

    A task without documents writes no file.
    """

    name = "clean text"

    def __init__(self, folder: str, fields: tuple[str, ...], counts: CountFile) -> None:
        super().__init__(folder, output_filename="${rank}.jsonl", compression=None)
        self.fields, self.counts = fields, counts

    def _default_adapter(self, document: Document) -> dict[str, Any]:
        values = document.metadata["fields"]
        return {"text": document.text, **{name: values[name] for name in self.fields if name in values}}

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        documents = size = 0
        for document in super().run(data, rank, world_size):
            documents, size = documents + 1, size + text_bytes(document.text)
            yield document
        name = f"{rank:05d}.jsonl"
        # The file is closed now. Its size tells later whether the disk has kept all of it.
        stored = self.output_folder.size(name) if documents else 0
        self.counts.write(rank, {"documents": documents, "bytes": size, "file": name, "file_bytes": stored})
