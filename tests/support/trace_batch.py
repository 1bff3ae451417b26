"""Run pretrain_glm.py and say which files of the project run between the read of a batch and its loss.

    NUMBA_DISABLE_JIT=1 python tests/support/trace_batch.py OUTPUT --config FILE ...

Without compilation every function is seen, those of the samplers and objectives too. OUTPUT becomes JSON: the files on
the call stack at the beginning of the second step, those whose functions run from there to the first loss, and those
that make the step's data in another thread.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

ROOMS = ("pretrain_glm.py", "megatron_lite", "data_utils", "scripts")


def main() -> None:
    output, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    import pretrain_glm
    from megatron_lite.model.trunk.glm import GLM
    from megatron_lite.train.loop.prefetch import StepMaker
    from megatron_lite.train.loop.trainer import Trainer

    files: dict[str, None] = {}  # in the order of their first call
    train_step, make, steps, made = Trainer._train_step, StepMaker.make, [], []

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files[frame.f_code.co_filename] = None
        elif event == "return" and frame.f_code is GLM.forward.__code__:
            sys.setprofile(None)

    def second_step(trainer: Trainer, *arguments: Any) -> Any:
        steps.append(trainer.step)
        if len(steps) == 2:
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                files[frame.f_code.co_filename] = None
                frame = frame.f_back
            sys.setprofile(record)
        return train_step(trainer, *arguments)

    def second_data(maker: StepMaker, *arguments: Any) -> Any:
        """In the thread that makes the next step's data."""
        made.append(arguments)
        sys.setprofile(record if len(made) == 2 else None)
        return make(maker, *arguments)

    Trainer._train_step = second_step  # type: ignore[method-assign]
    StepMaker.make = second_data  # type: ignore[method-assign]
    with np.errstate(over="ignore"):  # 64-bit products wrap around, of which compiled code says nothing
        pretrain_glm.main()
    assert len(steps) > 1
    places = [Path(name).relative_to(ROOT) for name in files if Path(name).is_relative_to(ROOT)]
    Path(output).write_text(json.dumps([str(place) for place in places if place.parts[0] in ROOMS]))


if __name__ == "__main__":
    main()
