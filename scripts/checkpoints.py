#!/usr/bin/env python3
"""List and verify the checkpoints of a run, go back to an older one, or merge several. See docs/checkpoints.md.

python scripts/checkpoints.py list runs/base
python scripts/checkpoints.py verify runs/base
python scripts/checkpoints.py verify runs/base/checkpoints/step_00001000
python scripts/checkpoints.py rewind runs/base 1000
python scripts/checkpoints.py merge runs/base 1000 2000 3000 --weights linear --output runs/merged
python scripts/checkpoints.py merge runs/one runs/two --weights 0.3,0.7 --output runs/merged

`list` reads manifests and file sizes; `verify` reads everything and compares the checksums; `rewind` moves the
checkpoints after a step aside, so that the run continues from it; `merge` writes the weighted mean of the weights of
steps or runs: `linear` and `1-sqrt` are as if the learning rate had decayed so between the first and the last. Exit
status: 0 when all checkpoints are good, 1 when one is damaged, 2 when there is none or the command is wrong.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.errors import ArgumentParser, CheckpointError, ConfigError, expanded_path, run_command
from data_utils.common.files import require_new_directory
from data_utils.common.progress import progress_bar
from data_utils.common.setting_files import shown
from data_utils.common.untrusted import conform
from megatron_lite.checkpoint.manifest import checkpoints_at_steps, checkpoints_in, list_checkpoints
from megatron_lite.checkpoint.resolve_path import PathType, check_output_directory, path_type, resolve_run
from megatron_lite.runtime.lease import held
from megatron_lite.runtime.run_state import read_run_state
from megatron_lite.telemetry.writer import record_rewind

if TYPE_CHECKING:  # imports torch, which takes seconds: functions import it after the arguments are checked
    from megatron_lite.checkpoint.manifest import Checkpoint

COLUMNS = ("checkpoint", "saved at (UTC)", "size", "layout", "tokens", "state")
DAMAGED_STATUS = 1
_Size = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Parallel(TypedDict):
    tensor_parallel_size: NotRequired[_Size]
    pipeline_parallel_size: NotRequired[_Size]
    zero_stage: NotRequired[int]


class _Config(TypedDict):
    parallel: NotRequired[_Parallel]


class _State(TypedDict):
    """The fields of a checkpoint's state that the table shows."""

    config: NotRequired[_Config]


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("list", "verify", "rewind", "merge"))
    parser.add_argument("directory", type=Path, help="run, checkpoint directory, or step_... directory")
    parser.add_argument(
        "more",
        type=expanded_path,
        nargs="*",
        help="rewind: step to resume from; merge: steps of the run, or other runs",
    )
    parser.add_argument(
        "--weights", default="mean", help="merge: weights mean, linear, 1-sqrt, or 0.2,0.8 (default: mean)"
    )
    parser.add_argument("--output", type=Path, help="merge: new run directory for the merged checkpoint")
    arguments = parser.parse_intermixed_args()
    command, more = arguments.command, arguments.more
    if command == "rewind" and not (len(more) == 1 and more[0].isdigit()):
        given = f"{shown(' '.join(more))} is none" if more else "none is given"
        raise ConfigError(
            f"rewind needs RUN and the number of a step, and {given}; `checkpoints.py list RUN` shows the steps."
        )
    if command in ("list", "verify") and more:
        raise ConfigError(
            f"{command} takes a single run, checkpoint directory or checkpoint, but got {' '.join(more)} too; "
            "call it once for each."
        )
    if command == "merge" and (numbers := [each for each in more if _is_fraction(each)]):
        raise ConfigError(
            f"merge takes steps or runs, but {', '.join(numbers)} is neither; separate the numbers of "
            "--weights with commas, as in --weights 0.3,0.7."
        )
    if (command == "merge") != (arguments.output is not None):
        raise ConfigError(f"{command} takes {'--output DIRECTORY' if command == 'merge' else 'no --output'}.")
    return arguments


def _is_fraction(text: str) -> bool:
    """Whether an argument is a number that is no step, and nothing of this name exists."""
    return re.fullmatch(r"\d*\.\d+", text) is not None and not Path(text).exists()


def main() -> int:
    arguments = parse_arguments()
    if arguments.command == "rewind":
        rewind(arguments.directory, int(arguments.more[0]))
        return 0
    if arguments.command == "merge":
        merge_into(arguments.output, arguments.directory, arguments.more, arguments.weights)
        return 0
    paths = find(arguments.directory)
    check = verify if arguments.command == "verify" else lambda checkpoint: None
    rows, problems = [], []
    for path in paths:
        row, problem = examine(path, check)
        rows.append(row)
        problems += [problem] if problem else []
    print_table(rows, arguments.command == "verify")
    for problem in problems:
        print(f"damaged: {problem}", file=sys.stderr)
    return DAMAGED_STATUS if problems else 0


def find(directory: Path) -> list[Path]:
    """The checkpoints below a run, a directory of checkpoints, or the one given. Raises CheckpointError."""
    found = path_type(directory)
    if found is PathType.CHECKPOINT:
        return [directory]
    if found is PathType.FILE and not directory.is_symlink():
        resolve_run(directory)
    with contextlib.suppress(OSError):  # the state says why
        if paths := list_checkpoints(checkpoints_in(directory)):
            return paths
    if problem := read_run_state(directory).problem:
        raise CheckpointError(problem)
    resolve_run(directory)
    raise CheckpointError(f"{directory} holds no checkpoint: the run has not saved yet.")


def rewind(run: Path, step: int) -> None:
    """Set the checkpoints after `step` aside. Raises UserError, also while the run is training."""
    from megatron_lite.checkpoint.write import rewind

    resolve_run(run)
    read_run_state(run).require_checkpoints()
    with held(run, "rewinds"):
        aside = rewind(run, step)
        # Also if nothing moved: an earlier command may have been killed between the two.
        record_rewind(run, step)
    if aside is None:
        print(f"{run}: the checkpoint of step {step} is already the latest")
        return
    count = len(list_checkpoints(aside))
    print(
        f"{run} will resume from step {step}; {count} newer checkpoints were moved to {aside} and can be "
        "deleted"
    )


def merge_into(output: Path, run: Path, more: list[str], weights: str) -> None:
    """Write the merged checkpoint of steps of a run, or of runs. Raises UserError."""
    require_new_directory(output)
    check_output_directory(output, "--output")
    from megatron_lite.checkpoint.merge import DECAYS, merge, merge_shares
    from megatron_lite.checkpoint.verify import find_manifest

    paths = [run, *map(Path, more)]
    given = list(map(int, more)) if all(each.isdigit() for each in more) else []  # steps of one run
    if given:
        find(run)
        paths = checkpoints_at_steps(checkpoints_in(run), sorted(given))
    if len(set(paths)) < max(2, len(paths)):
        raise ConfigError(f"merge got {len(set(paths))} distinct checkpoints; pass at least two.")
    sources = [find_manifest(path) for path in paths]
    shares = merge_shares(weights, [source.step for source in sources])
    if given and weights not in ("mean", *DECAYS):  # numbers belong to the steps in the order that was given
        shares = [shares[i] for i in sorted(range(len(given)), key=given.__getitem__)]
    for source in sources:
        verify(source)
    path = merge(sources, shares, output)
    for source, share in zip(sources, shares, strict=True):
        print(f"{share:8.4f}  {source.path}")
    print(f"{path} holds their weighted mean, without optimizer state")


def examine(path: Path, check: Callable[[Checkpoint], None]) -> tuple[list[str], str]:
    """A row of the table, and what is wrong with the checkpoint, "" if nothing."""
    from megatron_lite.checkpoint.verify import read_checkpoint

    try:
        checkpoint = read_checkpoint(path)
        check(checkpoint)
    except CheckpointError as error:
        return [path.name, "", "", "", "", "damaged"], str(error)
    tokens = checkpoint.state.get("consumed_tokens")
    return [
        path.name,
        (checkpoint.saved_at or "?").removesuffix("+00:00"),
        f"{checkpoint.bytes / 1e6:,.1f} MB",
        layout(checkpoint),
        f"{tokens:,}" if isinstance(tokens, int) else "?",
        "good",
    ], ""


def layout(checkpoint: Checkpoint) -> str:
    """`tp2 pp1 dp4 zero1`: the ranks that wrote it."""
    try:
        parallel = conform(checkpoint.state, _State).get("config", {}).get("parallel", {})
    except ValueError:
        return "?"
    tp, pp = parallel.get("tensor_parallel_size", 1), parallel.get("pipeline_parallel_size", 1)
    return f"tp{tp} pp{pp} dp{len(checkpoint.files) // (tp * pp)} zero{parallel.get('zero_stage', '?')}"


def verify(checkpoint: Checkpoint) -> None:
    """Compare all checksums, with a progress bar on a terminal."""
    from megatron_lite.checkpoint.verify import checksum_blocks, verify_checkpoint

    with progress_bar(
        total=checkpoint.bytes, unit="B", unit_scale=True, desc=checkpoint.path.name, disable=None
    ) as bar:
        for block in checksum_blocks(checkpoint):
            verify_checkpoint(checkpoint, [block])
            bar.update(block.bytes)


def print_table(rows: list[list[str]], verified: bool) -> None:
    titles = [*COLUMNS[:-1], "checksums" if verified else "manifest"]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    for row in [titles, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
