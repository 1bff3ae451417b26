"""The time that planning of the next step takes from the thread that launches kernels: `python benchmarks/planning.py`.

The thread reads rows, counts them and plans their attention while the step before computes (train/prefetch.py). It
costs that step only what it holds the interpreter for: compiled functions and numpy's passes release it.

Both are printed for each row, for a GPU's plan: CPU time, and that with the interpreter held. A timer of the
process's CPU time interrupts the thread, and a compiled handler looks whether the interpreter is taken. So other work
on the machine disturbs neither much. `row_us` of the host in megatron_lite/estimate/gpus.yaml is of this.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch
from numba import cfunc, types
from numba.extending import intrinsic

from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.dataset import write_random
from data_utils.common.errors import ArgumentParser, expanded_path, run_command
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.loader.loader import SampleLoader
from data_utils.loader.mixture import Mixture
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives import make_objective
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from megatron_lite.config.tree import Config, load_config
from megatron_lite.estimate.batches import vocabulary
from megatron_lite.estimate.step_estimate import with_vocabulary
from megatron_lite.model.batch import Batch
from megatron_lite.model.length_table import length_table
from megatron_lite.model.model_input import ModelInput, prepare

PROCESSORS = 132  # of the GPU that is planned for
TICK_SECONDS = 0.001  # between two looks, in CPU time; the kernel may make it 4 ms
COUNTS = np.zeros(2, np.int64)  # looks, and those that found the interpreter taken

_PLACE = COUNTS.ctypes.data
_current = ctypes.CDLL(None)._PyThreadState_UncheckedGet  # the thread that has the interpreter, 0 = none
_current.restype, _current.argtypes = ctypes.c_size_t, []


@intrinsic  # type: ignore[untyped-decorator]
def _numbers(typing, address):  # type: ignore[no-untyped-def]
    """int64 numbers at an address."""

    def make(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(address), make


@cfunc(types.void(types.int32))  # type: ignore[untyped-decorator]
def _look(number):  # type: ignore[no-untyped-def]
    counts = _numbers(_PLACE)
    counts[0] += 1
    counts[1] += _current() != 0


class Planner:
    """Makes inputs of a GPU as the thread of a rank does. The memory it puts them into is not pinned."""

    def __init__(self, config: Config, prefix: Path):
        assert config.model.vocab_size is not None
        words = vocabulary(config.model.vocab_size, np.random.default_rng(1))
        data, seed = config.data, config.training.seed
        objective = make_objective(
            config.objective_choices, words, seed, data.sequence_length, data.row_length
        )
        index = WindowIndex(IndexedDataset(prefix), data.sequence_length, DOCUMENT_OVERHEAD)
        self.loader = SampleLoader(Mixture([(index, 1.0)], seed), objective)
        self.config, self.rows = config, config.batch.micro_batch_size
        self.table = length_table(self.rows * config.row_length, config.model, PROCESSORS, 1, False)
        self.device = torch.device("cuda")

    def plan(self, number: int) -> ModelInput:
        """A micro-batch, counted and planned as by `StepMaker.make` and `Engine.prepared`."""
        samples = np.arange(number * self.rows, (number + 1) * self.rows)
        batch, model = Batch(self.loader.batch(samples), samples), self.config.model
        _ = batch.layer_keys(model), batch.loss_rows, batch.targets, batch.target_keys
        _ = batch.loss_weights(5), batch.loss_weight
        length = int(self.table[np.searchsorted(self.table, batch.tokens)])
        return prepare(batch, self.device, model, dropout_seed=number, multiple=length, few_counts=True)


def measure(plan: Callable[[int], object], rows: int, batches: int) -> dict[str, float]:
    """Microseconds of a row: CPU, and with the interpreter held; the looks that the latter is from."""
    for number in range(3):
        plan(number)
    ctypes.CDLL(None).signal(signal.SIGPROF, ctypes.c_void_p(_look.address))
    COUNTS[:] = 0
    signal.setitimer(signal.ITIMER_PROF, TICK_SECONDS, TICK_SECONDS)
    started = time.process_time()
    for number in range(batches):
        plan(number)
    each = (time.process_time() - started) / batches / rows * 1e6
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    looks, held = COUNTS.tolist()
    return {"cpu_us": each, "held_us": held / max(looks, 1) * each, "looks": looks}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", default=[], help="default: glm-large")
    parser.add_argument("--rows", type=int, default=16, help="of a micro-batch (default 16)")
    parser.add_argument("--batches", type=int, default=2000, help="that are planned (default 2000)")
    parser.add_argument("--json", type=expanded_path, metavar="FILE")
    options = parser.parse_args()
    check_at_least(options, 1, "rows", "batches")
    check_places(result=options.json)
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    rows = f"batch.micro_batch_size={options.rows}"
    config = with_vocabulary(load_config(options.config or ["glm-large"], [rows]))
    with tempfile.TemporaryDirectory() as directory:
        write_random(Path(directory) / "corpus", 2_000_000)
        planner = Planner(config, Path(directory) / "corpus")
        found = measure(planner.plan, planner.rows, options.batches)
    print(
        f"a row: {found['cpu_us']:.1f} us of CPU, {found['held_us']:.1f} us of it with the interpreter held, by "
        f"{found['looks']:.0f} looks"
    )
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    run_command(main)
