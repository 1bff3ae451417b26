#!/usr/bin/env python3
"""Serve one page on this machine to try a run in a browser: type a text, see completions, probabilities and attention.

    python scripts/try.py RUN_DIRECTORY

The address is printed once the weights are loaded, and Ctrl-C ends. Nothing leaves this machine. Completions are what
scripts/generate.py prints with the same settings.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from data_utils.common.errors import ArgumentParser, UserError, run_command
from megatron_lite.checkpoint.resolve_path import resolve_model
from megatron_lite.inference.server import HOST, Server


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "run directory (latest valid checkpoint), or a step_... directory"
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    add("--port", type=int, default=8080, help="port of the page; 0 = any free port (default: 8080)")
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    args = parser.parse_args(arguments)
    resolve_model(args.checkpoint)
    server = Server(args.port)
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.inference.demo import Demo
    from megatron_lite.inference.open_run import open_run

    server.demo = Demo(open_run(args.checkpoint, args.tokenizer))
    print(f"http://{HOST}:{server.server_port}", flush=True)
    server.serve()


def end_at_once(status: int, error: UserError | None, is_printed: bool) -> None:
    """Exit without the interpreter's shutdown, in which a thread that still serves a browser can abort in torch."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def command() -> None:
    run_command(main, leave=end_at_once)


if __name__ == "__main__":
    command()
