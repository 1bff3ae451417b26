"""The step of a pipeline that reads the documents of a task."""

import copy

from data_utils.cleaning.counts import CountFile
from data_utils.cleaning.reader import CorpusReader, Reading
from data_utils.corpus.documents import FileRange


def test_a_task_copies_no_names(tmp_path):
    """Each task copied the names of the files of all tasks: 15 s and half a gigabyte for a million."""
    ranges = [[FileRange(tmp_path / "a.jsonl")], [FileRange(tmp_path / "b.jsonl")]]
    reader = CorpusReader(ranges, Reading(), ["url"], CountFile(tmp_path))
    [copied] = copy.deepcopy([reader])
    assert copied is not reader and copied.ranges is reader.ranges
    assert copied.stats is not reader.stats and copied.fields == reader.fields
