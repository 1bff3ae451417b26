"""What a training step may cost: no count of the published models may grow. To be lowered where a step gets cheaper.

A table row: attention calls, launches forward and backward of a layer, and those by which the optimizer takes its
gradients; waits, copies, copies that wait and unaligned matmuls of a micro-batch; waits beside the micro-batches.
"""

from __future__ import annotations

import pytest
from support.step_profiles import TASKS

COLUMNS = (
    "attention",
    "forward",
    "backward",
    "sums",
    "waits",
    "copies",
    "pageable",
    "unaligned",
    "step waits",
)
CEILINGS = {
    # 335M, the paper's mixture, 16 x 568 tokens
    "data parallel": (2, 11, 15, 0, 0, 1, 0, 0, 1),
    "tensor parallel": (2, 13, 18, 0, 0, 1, 0, 0, 1),
    "sequence parallel": (2, 11, 18, 0, 0, 1, 0, 0, 1),
    "pipeline": (2, 11, 15, 0, 0, 1, 0, 0, 2),
    "modern": (2, 12, 16, 0, 0, 1, 0, 0, 1),  # rotary positions, RMSNorm, gates, no biases
    "local layers": (1, 9, 14, 0, 0, 1, 0, 0, 4),  # its optimizer reads numbers of tensors back
    "deberta": (1, 29, 42, 0, 0, 1, 0, 0, 1),
    "xlnet": (1, 18, 36, 0, 0, 1, 0, 0, 1),
    "llama": (1, 9, 14, 0, 0, 1, 0, 0, 1),
    "llama, fa3": (1, 9, 14, 0, 0, 1, 0, 0, 1),
    "llama, fa4": (1, 9, 14, 0, 0, 1, 0, 0, 1),
    "llama, torch": (1, 9, 14, 0, 0, 1, 0, 0, 1),
    "without dropout, fa3": (2, 11, 15, 0, 0, 1, 0, 0, 1),
    "local layers, fa3": (1, 9, 14, 0, 0, 1, 0, 0, 4),
    "qwen3": (1, 9, 14, 0, 0, 1, 0, 0, 1),
    # 8 experts: on one rank, and 4 of them on each of two. A wait a block: it reads how many tokens each expert has.
    "experts": (1, 108, 110, 1, 28, 1, 0, 84, 1),
    "experts of two ranks": (1, 92, 86, 0, 28, 1, 0, 84, 1),
    "unilmv2": (1, 8, 19, 0, 0, 1, 0, 0, 1),
    "t5": (1.5, 12.5, 26, 0.25, 0, 1, 0, 0, 1),  # an encoder's and a decoder's layer on average
    "bert": (1, 8, 19, 0, 0, 1, 0, 3, 1),  # the sentence head has two classes
}


def counts(profile):
    expected, details = profile.expected, profile.details
    return (
        expected.attention_calls_per_layer,
        expected.launches_per_layer_forward,
        expected.launches_per_layer_backward,
        details.sums_per_layer,
        expected.waits_per_micro_batch,
        expected.copies_per_micro_batch,
        sum(details.places["pageable"].values()),
        expected.unaligned_matmuls,
        sum(details.step_places.values()),
    )


def grown(profile, ceilings):
    """What is above its ceiling, in words, with the places where it happens."""
    places = {"attention": "attention", "waits": "waits", "copies": "pinned"}
    places |= {"pageable": "pageable", "unaligned": "unaligned"}
    lines = []
    for column, count, ceiling in zip(COLUMNS, counts(profile), ceilings, strict=True):
        if count > ceiling:
            at = profile.details.places.get(places.get(column, ""), {})
            lines.append(f"{column} {count:g}, at most {ceiling}: {at or profile.details.step_places}")
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", CEILINGS)
def test_no_count_grows(profile_of, name):
    assert grown(profile_of(name), CEILINGS[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["label smoothing", *(f"task, {head}" for head in TASKS)])
def test_losses_of_tasks_wait_for_nothing(profile_of, name):
    """As in pretraining: one asynchronous copy for each micro-batch, and one wait for each step."""
    profile = profile_of(name)
    _, _, _, _, waits, copies, pageable, _, step_waits = counts(profile)
    assert (waits, copies, pageable, step_waits) == (0, 1, 0, 1), profile.details.places
    if name == "label smoothing":  # it passes over the logits three times more, whatever their size
        forward = profile_of("data parallel").expected.launches_per_layer_forward
        assert profile.expected.launches_per_layer_forward == forward


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert, an item()", "bert, an attention call"])
def test_the_ceiling_finds_what_is_planted(profile_of, name):
    lines = grown(profile_of(name), CEILINGS["bert"])
    column = {"bert, an item()": "waits", "bert, an attention call": "attention"}[name]
    found = [line for line in lines if line.startswith(f"{column} ")]
    assert len(found) == 1 and "tests/support/step_profiles.py:" in found[0], lines
