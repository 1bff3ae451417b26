"""An input that several shards are made of."""

import pytest
from support.corpora import to_jsonl


@pytest.fixture
def input_path(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text(to_jsonl(f"{i} " * 100 for i in range(200)))
    return path
