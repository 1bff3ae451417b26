"""Small files of labelled samples for tests of readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_utils.common.errors import UserError
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import read_records
from data_utils.tasks.readers.files import TaskRecords


def task(reader: str, name: str = "own", kind: str = "classification", **settings) -> TaskConfig:
    return TaskConfig(name=name, kind=kind, reader=reader, **settings)


class Files:
    """Writes files into a folder and reads them as a task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def read(
        self, config: TaskConfig, content, name: str = "train.txt", labelled: bool = True
    ) -> TaskRecords:
        """Content: text, bytes, or a list of objects for lines of JSON."""
        if isinstance(content, list):
            content = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in content)
        return read_records(config, self.write(name, content), labelled=labelled)

    def refused(self, config: TaskConfig, content, *parts: str, name: str = "train.txt", **options) -> str:
        """The one line with which the file is refused; it holds the file's name and all parts."""
        with pytest.raises(UserError) as caught:
            self.read(config, content, name, **options)
        message = str(caught.value)
        assert "\n" not in message and message.endswith(".")
        for part in parts:
            assert part in message, message
        return message
