"""Run pretrain_glm.py and say which way a batch takes from its read to its loss.

    NUMBA_DISABLE_JIT=1 python tests/support/trace_batch.py OUTPUT --config FILE ...

Without compilation every function is seen, those of the samplers and objectives too. OUTPUT becomes JSON:

    files        those with a function that gets or returns the batch, or activations, in the order of their first call
    carriers     the classes of the project whose objects carry them
    changes      how often the next call is in another file than the one before
    returns      how many of these go back to a file that was left before
    loaded       every file of the project that the run has loaded

A value is of the batch if it is an array or a tensor, or an object of the project that holds one at most two levels
down. Parameters are not, nor numbers in fp64 (sums of losses and counts), random streams, and numbers of samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 8  # of a step: their numbers are no batch
BASES = ("Batch", "HostPlan", "AttentionPlan")  # carriers that are no dataclasses
ROOMS = ("pretrain_glm.py", "megatron_lite", "data_utils", "scripts")


def is_of_project(file: str) -> bool:
    return Path(file).is_relative_to(ROOT) and Path(file).relative_to(ROOT).parts[0] in ROOMS


class Trace:
    """The calls between the read of a batch and its loss."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.files: dict[str, None] = {}
        self.carriers: dict[str, None] = {}
        self.ways: dict[int, list[str]] = {}  # thread -> the file of each call that has the batch

    def record(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not is_of_project(code.co_filename):
            return
        if event == "call":
            count = code.co_argcount + code.co_kwonlyargcount
            values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        else:
            values = [value]
        if any([self._carries(value) for value in values]):  # a list, so that every carrier is noted
            self.files[code.co_filename] = None
            if event == "call":
                self.ways.setdefault(threading.get_ident(), []).append(code.co_filename)

    def _carries(self, value: Any, depth: int = 2) -> bool:
        torch = self._torch
        if isinstance(value, torch.nn.Parameter | torch.nn.Module):
            return False
        if isinstance(value, torch.Tensor):
            return value.numel() > 1 and value.dtype != torch.float64
        if isinstance(value, np.ndarray):
            return value.size > SAMPLES and value.dtype not in (np.float64, np.uint64)
        if depth == 0:
            return False
        if isinstance(value, list | tuple) and type(value).__module__ == "builtins":
            return any([self._carries(item, depth) for item in value[:8]])
        held = self._held(value)
        if any([self._carries(item, depth - 1) for item in held]):
            self.carriers[f"{type(value).__module__}.{type(value).__qualname__}"] = None
            return True
        return False

    def _held(self, value: Any) -> list[Any]:
        """What an object of the project passes on; [] for the machinery that only works on it."""
        if not type(value).__module__.startswith(("data_utils", "megatron_lite")):
            return []
        if isinstance(value, tuple):
            return list(value)
        if dataclasses.is_dataclass(value) or any(base.__name__ in BASES for base in type(value).__mro__):
            names = getattr(value, "__dict__", None) or {
                name: None for name in getattr(value, "__slots__", ())
            }
            return [getattr(value, name, None) for name in names]
        return []

    def summary(self) -> dict[str, Any]:
        changes = returns = 0
        for way in self.ways.values():
            left: set[str] = set()
            for before, after in itertools.pairwise(way):
                changes += before != after
                returns += before != after and after in left
                left.add(before)
        loaded = {
            module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)
        }
        return {
            "files": [str(Path(name).relative_to(ROOT)) for name in self.files],
            "carriers": sorted(self.carriers),
            "changes": changes,
            "returns": returns,
            "loaded": sorted(str(Path(name).relative_to(ROOT)) for name in loaded if is_of_project(name)),
        }


def main() -> None:
    output, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    import pretrain_glm
    from megatron_lite.model.trunk.glm import GLM
    from megatron_lite.train.loop.step import StepMaker
    from megatron_lite.train.loop.trainer import Trainer

    trace = Trace()
    train_step, make, steps, made = Trainer._train_step, StepMaker.make, [], []

    def record(frame: FrameType, event: str, value: Any) -> None:
        trace.record(frame, event, value)
        if event == "return" and frame.f_code is GLM.forward.__code__:
            sys.setprofile(None)

    def second_step(trainer: Trainer, *arguments: Any) -> Any:
        steps.append(trainer.step)
        if len(steps) == 2:
            sys.setprofile(record)
        return train_step(trainer, *arguments)

    def second_data(maker: StepMaker, *arguments: Any) -> Any:
        """In the thread that makes the next step's data."""
        made.append(arguments)
        sys.setprofile(trace.record if len(made) == 2 else None)
        return make(maker, *arguments)

    Trainer._train_step = second_step  # type: ignore[method-assign]
    StepMaker.make = second_data  # type: ignore[method-assign]
    with np.errstate(over="ignore"):  # 64-bit products wrap around, of which compiled code says nothing
        pretrain_glm.main()
    assert len(steps) > 1
    Path(output).write_text(json.dumps(trace.summary()))


if __name__ == "__main__":
    main()
