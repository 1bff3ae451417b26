"""The process that traces: reads requests from stdin as JSON, and writes a line of JSON for each to stdout.

It loads the libraries once and forks for each traced rank, so that one that fails or dies takes no other with it.
`python -m benchmarks.step_trace.worker`
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.step_trace import guards
from benchmarks.step_trace.expected import expect
from benchmarks.step_trace.request import Request
from benchmarks.step_trace.trace import Case, run_case
from data_utils.common.errors import UserError, run_command


def load_libraries() -> None:
    """Import the slow libraries that every traced rank needs, before the ranks are forked."""
    import deepspeed.ops
    import deepspeed.runtime.pipe.engine
    import deepspeed.runtime.zero.stage3

    _ = deepspeed.ops.__compatible_ops__  # as `initialize` does

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a forked rank would copy all that was imported


def forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `work` in a process of its own, or {"refused": message}, or {"failed": traceback}.

    Forking is safe until the first backward pass, which starts autograd's threads: so none runs in this process.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.dup2(2, 1)  # what libraries print is no result
        with os.fdopen(writer, "w") as pipe:
            json.dump(_answer(work), pipe)
        guards.leave()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if text else {"failed": f"a traced rank ended with status {status}"}


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except UserError as error:
        return {"refused": str(error)}
    except BaseException:
        return {"failed": traceback.format_exc()}


def traced(case: Case) -> dict[str, Any]:
    return forked(functools.partial(run_case, case))


def main() -> None:
    guards.require_known()
    requests = [Request(**tree) for tree in json.load(sys.stdin)]
    load_libraries()
    for request in requests:
        print(json.dumps(expect(request, traced)), flush=True)


if __name__ == "__main__":
    run_command(main)
