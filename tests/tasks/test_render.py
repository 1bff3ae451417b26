"""Every kind of task: its head, pure samples, and that parts are found again in a collated batch."""

from __future__ import annotations

import numpy as np
import pytest
from support.tasks.task_inputs import record, renderer

from data_utils.common.batch_fields import TOKENS, WEIGHTS
from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.base import HEADS
from data_utils.tasks.config import KINDS
from data_utils.tasks.templates.collate import collate
from data_utils.tasks.templates.input_formats import FORMAT_OF_OBJECTIVE
from data_utils.tasks.templates.render import TASK_TYPES

TEXT = "rain falls in wet city he runs north and south"
# Settings and a record for each kind.
CASES = {
    "cloze": ({"name": "sst2"}, record("1", text_a=TEXT)),
    "classification": ({"labels": ("0", "1")}, record("1", text=TEXT)),
    "regression": ({}, record(1.5, text=TEXT)),
    "seq2seq": ({}, record("he", source=TEXT, target="he runs")),
    "blanks": ({}, record(TEXT, text=TEXT)),
    "typing": (
        {"labels": ("a", "b", "c"), "marks": {"mention": "and"}},
        record(("a", "c"), text=TEXT, mention=(14, 22)),
    ),
    "spans": (
        {"sequence_length": 16, "stride": 4, "question_length": 4, "answer_length": 4},
        record(("city",), question="who", context=TEXT, answers=(("city", TEXT.index("city")),)),
    ),
    "tagging": ({"labels": ("O", "B-PER")}, record(("O",) * 10, words=tuple(TEXT.split()))),
}


def test_every_type_is_rendered():
    assert set(KINDS) == set(TASK_TYPES) == set(CASES)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_pure_and_found_again_in_a_batch(kind):
    more, given = CASES[kind]
    made, again = (renderer(kind=kind, **more) for _ in range(2))
    assert made.head in HEADS
    records = [given, *made.prepare([given], training=True)]
    records += made.prepare([given, given], training=False)
    samples = [made.sample(each, number, 1) for number, each in enumerate(records)]
    fields, parts = collate(samples)
    same, _ = collate([again.sample(each, number, 1) for number, each in enumerate(records)])
    assert (fields == same).all()
    assert (fields[:, WEIGHTS].any(axis=1) == (made.head == "tokens")).all(), "a loss by tokens, or by parts"
    assert bool(len(parts.positions)) == (made.head != "tokens")
    every = [part for sample in samples for part in sample.target_groups]
    documents = [
        sample.documents[part.document].tokens for sample in samples for part in sample.target_groups
    ]
    tokens = fields[:, TOKENS].reshape(-1)
    for number, (part, document) in enumerate(zip(every, documents, strict=True)):
        mine = parts.position_group == number
        assert (tokens[parts.positions[mine]] == document[part.positions]).all()
        assert (parts.targets[parts.target_group == number] == part.targets).all()
    if made.head in ("choices", "tags"):
        assert (parts.position_group == parts.target_group).all(), "a row for each target"
    assert np.bincount(parts.sample, minlength=len(samples)).tolist() == [
        len(s.target_groups) for s in samples
    ]


LONG = "rain falls " * 40


@pytest.mark.parametrize("objective", FORMAT_OF_OBJECTIVE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [20, 40])
def test_no_position_exceeds_what_the_model_is_asked_for(kind, objective, length):
    """And sequence to sequence uses all of it, so that no longer model is asked for."""
    more = {**CASES[kind][0], "sequence_length": length, "target_length": 30, "stride": 9, "blank_ratio": 0.9}
    more |= {"question_length": 4, "answer_length": 4}
    given = CASES[kind][1]
    fields = {
        name: LONG if name in ("text", "text_a", "source", "target", "context") else value
        for name, value in given.fields.items()
    }
    try:
        made = renderer(objective, kind=kind, **more)
    except ConfigError:  # this model cannot do such a task
        return
    answers = {"answers": (("rain", 0),)} if kind == "spans" else {}
    last = 0
    for number, prepared in enumerate(made.prepare([record(given.label, **fields | answers)], training=True)):
        for example in made.sample(prepared, number).documents:
            last = max(last, example.position_ids.max(), example.block_position_ids.max())
    assert last <= made.max_position_needed
    assert last == made.max_position_needed or kind != "seq2seq" or objective in ("causal", "fill_in_middle")


@pytest.mark.parametrize("kind", [*KINDS, "wsc", "copa", "record"])
def test_a_record_of_another_format_is_refused_in_one_line(kind):
    more = {"name": kind, "kind": "cloze"} if kind not in KINDS else {"kind": kind, **CASES[kind][0]}
    made = renderer(**more)
    with pytest.raises(
        DataError, match=r"^data.jsonl:1: the (task|pattern) needs the .* has body;"
    ) as caught:
        (given,) = made.prepare([record("0", body="x")], training=False)
        made.sample(given, 0)
    assert "\n" not in str(caught.value)
