#!/usr/bin/env python3
"""Describe training runs: one HTML page, a picture of the losses, or where each rank is.

    python scripts/report.py RUN_DIRECTORY [RUN_DIRECTORY ...] [--output page.html]
    python scripts/report.py RUN_DIRECTORY --plot [--output loss.svg]
    python scripts/report.py RUN_DIRECTORY --heartbeats

The page has curves, speed, events, settings, checkpoints and filled blanks. It is one file that loads nothing, so it
can be mailed, archived or printed. All three work while a run trains.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import time
from collections.abc import Sequence
from pathlib import Path

from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.common.files import require_writable, write_whole
from megatron_lite.checkpoint.resolve_path import resolve_run
from megatron_lite.report.page import MAX_RUNS, page
from megatron_lite.report.run import read_run, read_unigram
from megatron_lite.runtime.heartbeats import heartbeat_directory, read_heartbeats
from megatron_lite.telemetry.records import read_metrics

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIRECTORY", help="directory of a training run"
    )
    text = "file to write (default: report.html, or loss.png with --plot, in the first run's directory)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    instead = parser.add_mutually_exclusive_group()
    text = "draw the losses of one run instead of the page, as .png, .svg or .pdf"
    instead.add_argument("--plot", action="store_true", help=text)
    text = "print where each rank of one run is instead of the page; the ranks that the others wait for come first"
    instead.add_argument("--heartbeats", action="store_true", help=text)
    args = parser.parse_args(arguments)
    option = "--plot" if args.plot else "--heartbeats" if args.heartbeats else None
    if option and len(args.runs) > 1:
        raise ConfigError(f"{option} takes one run, but {len(args.runs)} are given; give one.")
    if args.heartbeats:
        if args.output:
            raise ConfigError("--heartbeats prints and writes no file; leave --output out.")
        print_heartbeats(args.runs[0])
    elif args.plot:
        write_plot(args.runs[0], args.output or args.runs[0] / "loss.png")
    else:
        write_page(args.runs, args.output or args.runs[0] / "report.html")


def write_page(paths: Sequence[Path], output: Path) -> None:
    if len(paths) > MAX_RUNS:
        raise ConfigError(
            f"{len(paths)} runs are given, but a page shows at most {MAX_RUNS}; write several pages."
        )
    runs = [read_run(path) for path in paths]
    require_writable(output, "--output")
    write_whole(output, page(runs, time.time()).encode("utf-8", "replace"), "--output")
    print(output)


def write_plot(run: Path, output: Path) -> None:
    if output.suffix not in PLOT_SUFFIXES:
        raise ConfigError(
            f"--output is {str(output)!r}; its suffix must be one of {', '.join(PLOT_SUFFIXES)}."
        )
    resolve_run(run)
    require_writable(output, "--output")
    from megatron_lite.report.loss_plot import plot_losses  # matplotlib takes a second to load

    plot_losses(read_metrics(run), read_unigram(run), output)
    print(output)


def print_heartbeats(run: Path) -> None:
    """One line for each rank. Those furthest behind come first, because the others wait for them."""
    directory = heartbeat_directory(run)
    heartbeats = read_heartbeats(directory)
    if not heartbeats:
        resolve_run(run)
        raise DataError(
            f"{directory} holds no heartbeats; the run writes them while it trains, every timeouts.heartbeat_seconds."
        )
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
