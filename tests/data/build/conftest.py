"""A text file that a build cuts into several shards."""

import pytest
from support.data.corpora import to_jsonl


@pytest.fixture
def input_path(tmp_path):
    """JSON lines of 200 documents of 100 words."""
    path = tmp_path / "input.jsonl"
    path.write_text(to_jsonl(f"{i} " * 100 for i in range(200)))
    return path
