"""Random layouts, options and objectives equal one process: two draws, 60 if slow tests run."""

from __future__ import annotations

import pytest
from support.drawn_layouts import DEGREES, draw, failures_of
from support.parity import outcomes_of
from support.selection import slow_but


@pytest.mark.parametrize("number", slow_but([1], range(60)))
def test_a_draw_equals_one_process(number):
    case, _ = draw(number)
    print(case)
    (outcome,) = outcomes_of([case])
    assert failures_of(case, outcome) == []


def test_draws_are_functions_of_their_numbers_and_differ():
    """Among the first are all layouts, and decoders, dropout and recomputation with and without."""
    cases = [draw(number)[0] for number in range(24)]
    assert list(map(str, cases)) == [str(draw(number)[0]) for number in range(24)]
    assert len(set(map(str, cases))) == len(cases)
    assert {(case.tensor, case.pipeline, case.data) for case in cases} == set(DEGREES)
    models = [case.config().model for case in cases]
    for of_case in (
        lambda model, case: model.decoder_layers > 0,
        lambda model, case: model.output_dropout > 0,
        lambda model, case: model.tie_word_embeddings,
        lambda model, case: model.block_positions == "table",
        lambda model, case: model.block_positions == "halves",
        lambda model, case: case.optimizer == "muon",
        lambda model, case: case.optimizer == "adamw",
        lambda model, case: case.sequence_parallel,
        lambda model, case: case.recompute != "none",
        lambda model, case: len(case.config().objective_choices) > 1,
    ):
        assert {of_case(model, case) for model, case in zip(models, cases, strict=True)} == {False, True}
