"""Whether a start would train nothing, and whether that is what its configuration asks for. Needs no torch.

A sweep that names one directory twice must not skip its second half without a message: where a run is trained to its
end, a start with settings that make another run is refused.
"""

from __future__ import annotations

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.verify import ChecksumBlock, checksum_blocks, verify_checkpoint
from megatron_lite.config.tree import Config
from megatron_lite.runtime.changes import differences, shown
from megatron_lite.runtime.run_state import RunState
from megatron_lite.telemetry.writer import is_recorded

_CHECKED_BYTES = 4 << 30  # of a finished run's newest checkpoint, by each rank: a few seconds


def nothing_to_do(config: Config, found: RunState) -> str | None:
    """Why a start would train no step, None if it would. It is known before libraries are loaded.

    Args: config: complete, with the vocabulary's size.
    Raises: CheckpointError if the run was trained with settings that make it another run.
    """
    training, newest = config.training, found.newest
    if config.checkpoint.resume == "never" or newest is None:
        return None  # such a start has messages of its own
    last = training.stop_after_step or training.steps
    if newest.step < last:
        return None
    name = "steps" if training.stop_after_step is None else "stop_after_step"
    reached = f"the newest checkpoint of {found.run} is of step {newest.step}, and training.{name} is {last}"
    differing = differences(config, newest.trainer_state(), is_over=True)
    if differing:
        raise CheckpointError(
            f"{reached}, but the run was trained with other settings ({shown(differing)}), so the new ones would train "
            "nothing. Choose another run.directory, or the settings of its config.yaml."
        )
    # A run is over with its last evaluation, which may have been cut off.
    is_validated = not config.data.validation or is_recorded(found.run, "validation", newest.step)
    if newest.step == training.steps and not is_validated:
        return None  # the start was ended between its last save and its last evaluation
    try:
        # A sample of the blocks: every rank does this before the ranks meet, and all of a large checkpoint would take
        # each of them hours.
        verify_checkpoint(newest, sampled_blocks(newest))
    except CheckpointError:
        return None  # the start falls back to an older one, and trains the rest again
    return f"nothing to do: {reached}; raise training.{name} to train on."


def sampled_blocks(checkpoint: Checkpoint) -> list[ChecksumBlock]:
    """All blocks of a small checkpoint, else blocks at equal distances that take a few seconds to check."""
    blocks = checksum_blocks(checkpoint)
    return blocks[:: max(1, -(-checkpoint.bytes // _CHECKED_BYTES))]
