#!/usr/bin/env python3
"""Write one HTML page about one or several training runs: curves, speed, events, settings, checkpoints, filled blanks.

    python scripts/report.py RUN_DIRECTORY [RUN_DIRECTORY ...] --output page.html

The page is one file that loads nothing, so it can be mailed, archived or printed. It can be made while a run trains.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import time
from collections.abc import Sequence
from pathlib import Path

from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_writable, write_whole
from megatron_lite.report.page import MAX_RUNS, page
from megatron_lite.report.run import read_run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIRECTORY", help="directory of a training run"
    )
    text = "file to write (default: report.html in the first run's directory)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    args = parser.parse_args(arguments)
    if len(args.runs) > MAX_RUNS:
        raise ConfigError(
            f"{len(args.runs)} runs are given, but a page shows at most {MAX_RUNS}; write several pages."
        )
    output = args.output or args.runs[0] / "report.html"
    runs = [read_run(path) for path in args.runs]
    require_writable(output, "--output")
    write_whole(output, page(runs, time.time()).encode("utf-8", "replace"), "--output")
    print(output)


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
