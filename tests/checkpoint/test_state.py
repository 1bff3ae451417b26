"""What the trainer keeps in a checkpoint: written and read by one class, and refused in one line if it is not whole."""

import json
from pathlib import Path

import pytest

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.trainer_state import TrainerState

WHOLE = TrainerState(
    step=3, consumed_samples=24, consumed_tokens=900, skipped_steps=1, skipped_in_a_row=0, restarts=2,
    config={"run": {"directory": "a"}}, data=[{"tokens": 5}], events={"history": [], "in_force": []},
)  # fmt: skip


def read(values):
    return TrainerState.from_json(values, Path("run/step_3"))


def test_what_is_written_is_read():
    assert read(json.loads(json.dumps(WHOLE.to_json()))) == WHOLE
    assert read(TrainerState.at_step_0({}).to_json()).data is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": "3"}, "step is '3' in its training state, which must be int;"),
        ({"skipped_steps": True}, "skipped_steps is True"),
        ({"consumed_samples": 2.0}, "consumed_samples is 2.0"),
        ({"config": []}, r"config is \[\] in its training state, which must be dict"),
        ({"data": {}}, r"data is \{\} .* must be list\[dict\[str, Any\]\] \| None"),
        ({"events": None}, "events is None"),
    ],
)
def test_what_is_of_another_type_is_named(change, message):
    with pytest.raises(CheckpointError, match=f"^checkpoint run/step_3: {message}"):
        read({**WHOLE.to_json(), **change})


@pytest.mark.parametrize("values", [{}, None, [], {"note": "state"}])
def test_what_is_missing_is_named(values):
    with pytest.raises(CheckpointError, match="step is missing in its training state"):
        read(values)
