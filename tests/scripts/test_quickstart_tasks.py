"""The quickstart's tasks: what n-grams make of recall, the table, and training that fails."""

from __future__ import annotations

import pytest

from data_utils.common.errors import DataError
from scripts.quickstart import tasks
from scripts.quickstart.tasks import ngram_recall, table


def test_ngrams_repeat_one_word_and_guess_among_two() -> None:
    """With one key the word stands three tokens back, which a 5-gram counts; with two it has not seen most contexts."""
    one = ngram_recall("recall:pairs=1,samples=20000,seed=1", "recall:pairs=1,samples=200,seed=2")
    two = ngram_recall("recall:pairs=2,samples=20000,seed=1", "recall:pairs=2,samples=400,seed=2")
    assert one > 0.95 and 0.35 < two < 0.65


def test_the_table_has_the_best_possible_scores() -> None:
    rows = table({"recall": 0.5, "votes": 0.8354, "votes_from_nothing": 0.4}, 0.25).splitlines()[1:]
    assert [row.split()[-4:] for row in rows] == [
        ["0.500", "1.000", "5-gram", "0.250"],
        ["0.835", "0.837", "chance", "0.500"],
        ["0.400", "0.837", "chance", "0.500"],
    ]


def test_training_that_fails_is_reported_with_its_last_lines(tmp_path) -> None:
    with pytest.raises(DataError, match=r"ended with status 2: error: .*absent") as caught:
        tasks._tuned(tmp_path / "out", ["--task", tasks.VOTES, "--checkpoint", tmp_path / "absent"])
    assert "Traceback" not in str(caught.value)
