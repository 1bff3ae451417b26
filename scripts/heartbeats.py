"""Show where each rank of a run is: `python scripts/heartbeats.py RUN_DIRECTORY`.

The ranks furthest behind come first: those are the ones that the others wait for.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import time
from pathlib import Path

from data_utils.common.errors import ArgumentParser, DataError, run_command
from megatron_lite.runtime.heartbeats import heartbeat_directory, read_heartbeats


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run_directory", type=Path, help="run.directory of the run")
    directory = heartbeat_directory(parser.parse_args().run_directory)
    heartbeats = read_heartbeats(directory)
    if not heartbeats:
        raise DataError(f"{directory} holds no heartbeats; pass the run.directory of a run that has started.")
    print(f"{'rank':>5} {'step':>9} {'s in section':>12} {'s silent':>9}  {'host':16} {'section':11} place")
    for beat in sorted(heartbeats, key=lambda beat: (beat.passed, beat.rank)):
        silent = time.time() - beat.time
        print(
            f"{beat.rank:5} {beat.step:9} {beat.seconds:12.0f} {silent:9.0f}  {beat.host:16} {beat.section:11} "
            f"{beat.place}"
        )


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
