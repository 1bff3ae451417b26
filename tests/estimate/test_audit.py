"""Differences between the launches of two batches of one length, which a CUDA graph could not repeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.project import ROOT


def found(*settings):
    """Lines of `differences` for a block of the 335M model, and without their numbers: operations."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cuda",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "tests/support/audited.py", *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Tensors that enter the first block, forward and backward, and the bias of the last one, which is outside of blocks.
ENTER = {"add_norm", "mm", "add_norm_backward", "_foreach_copy_"}
MODERN = ("model.block_positions=halves", "model.rms_norm=true", "model.ffn=gated", "model.biases=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [(), ("model.positions=rotary", *MODERN)],
    ids=["glm", "modern"],
)
def test_launches_of_blocks_match_every_batch_of_a_shape(settings):
    """Numbers of the host, shapes, and memory by its place; but the seed, which is set before each replay.

    Angles of rotary positions are copied, before the first block, to where all blocks read them.
    """
    lines = found("training.cuda_graphs=true", *settings)
    enter = {line.split()[0] for line in lines if "reads what lies elsewhere" in line}
    others = [line for line in lines if "reads what lies elsewhere" not in line]
    assert enter <= ENTER | ({"copy_"} if settings else set())
    assert [line.split()[0] for line in others] == ["manual_seed"], others


@pytest.mark.slow
def test_without_graphs_attention_differs():
    operations = {line.split()[0] for line in found()}
    assert operations - ENTER == {
        "manual_seed", "_flash_attention_forward", "_flash_attention_backward", "index_select", "cat", "join_pair",
    }  # fmt: skip
