#!/usr/bin/env python3
"""Saving, loading and resharding of a model with optimizer state, compared with the disk, torch.save and DeepSpeed.

One process holds the state and saves it; another number of processes (`--ranks`) loads it. Everything is written to
`--directory` in the same run and forced to disk (fsync), also where the program that is compared does not do so, and
dropped from the page cache before it is read. The sequential rate of the disk is measured in each round with the same
number of bytes. "Training" beside an asynchronous save is matrix multiplications, one second a step.

DeepSpeed's way to another layout is `save_checkpoint`, `ds_to_universal`, `load_checkpoint` with `load_universal`; the
conversion is timed from when its process has imported everything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import torch

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.settings import build
from megatron_lite.checkpoint.manifest import ADAM_STATE
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import CheckpointConfig, ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.engine.plain import make_engine
from megatron_lite.parallel.context import ParallelContext, initialize
from megatron_lite.parallel.launch import Launch

SIZES = {"tiny": (2, 64, 2), "base": (12, 768, 12), "large": (24, 1024, 16)}  # layers, hidden size, heads
STEP, WRITE_BYTES = 1, 16 << 20
STEP_SECONDS = 1.0  # forward and backward of a training step during a save
TIMEOUT_SECONDS = 3600


def configuration(size: str, ranks: int, universal: bool) -> Config:
    layers, hidden_size, heads = SIZES[size]
    # ZeRO 3: the stage at which the optimizer, and so a checkpoint of it, is DeepSpeed's own.
    return build(
        Config,
        {
            "model": {
                "num_layers": layers,
                "hidden_size": hidden_size,
                "num_attention_heads": heads,
                "vocab_size": 30524,
            },
            "training": {"steps": 10, "precision": "bf16"},
            "batch": {"micro_batch_size": 1, "global_batch_size": ranks},
            "parallel": {"zero_stage": 3},
            "deepspeed": {"checkpoint": {"load_universal": True}} if universal else {},
        },
    )


# Processes


def in_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`function(context, *args)` in each of `ranks` new processes that form a group; their results."""
    with socket.socket() as holder:  # as long as it is bound, the system gives the port to no other process
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        return _results(function, ranks, holder.getsockname()[1], args)


def _results(function: Callable[..., Any], ranks: int, port: int, args: tuple) -> list[Any]:
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    processes = [
        fork.Process(target=_rank_main, args=(results, function, rank, ranks, port, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = {}
    while len(found) < ranks:
        if results.empty():
            if any(process.exitcode for process in processes):
                raise SystemExit("a process of the benchmark failed; its message is above")
            time.sleep(0.05)
            continue
        rank, value = results.get()
        found[rank] = json.loads(value)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(ranks)]


def _rank_main(
    results: Any, function: Callable[..., Any], rank: int, ranks: int, port: int, args: tuple
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
    )
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks
        context = initialize(Launch(rank, ranks, rank), ParallelConfig(zero_stage=3), TIMEOUT_SECONDS)
        value = function(context, *args)
    results.put((rank, json.dumps(value)))
    context.close()


# Measuring


@contextlib.contextmanager
def clock(times: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times.append(time.perf_counter() - start)


def report(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()  # what others left in the cache is not charged to the next
    return directory


def force_to_disk(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def drop_from_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def write_plainly(path: Path, total: int) -> None:
    """The disk's rate: one file, written from memory in order, then fsync."""
    block = os.urandom(WRITE_BYTES)
    with path.open("wb", buffering=0) as file:
        for start in range(0, total, WRITE_BYTES):
            file.write(memoryview(block)[: total - start])
        os.fsync(file.fileno())


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """The weights and moments that a rank owns, without the vocabulary's padding rows: fp32 [numel] views."""
    return {
        f"{fragment.name}/{kind}/{owned.start}": values.detach()[owned.start - fragment.start :][
            : owned.slice.size
        ]
        for fragment in engine.fragments()
        for kind, values in fragment.tensors.items()
        for owned in fragment.ranges()
    }


def total_of(engine: Engine, context: ParallelContext) -> float:
    """Sum of all weights and moments over all ranks: a check that the state arrived."""
    own = sum(float(values.double().sum()) for values in state_of(engine).values())
    return float(context.sum(torch.tensor([own], dtype=torch.float64)).item())


# What one process saves


def save_side(
    context: ParallelContext, directory: str, size: str, repeats: int, deepspeed: bool
) -> dict[str, Any]:
    root = Path(directory)
    engine = make_engine(configuration(size, 1, universal=False), context, num_losses=1)
    torch.manual_seed(0)
    for values in state_of(engine).values():
        values.uniform_()
    engine.gather_weights()
    parameters = sum(values.numel() for values in state_of(engine).values()) // len(ADAM_STATE)
    result: dict[str, Any] = {"total": total_of(engine, context), "parameters": parameters}
    times: dict[str, list[float]] = {"disk": [], "save": [], "torch": [], "deepspeed": []}
    for number in range(repeats):
        report(f"saving, round {number + 1} of {repeats}")
        fresh(root / "disk")
        (root / "disk").mkdir()
        with clock(times["disk"]):
            write_plainly(root / "disk/plain", 12 * parameters)
        fresh(root / "disk")
        fresh(root / "ours")
        with clock(times["save"]):
            path = save_checkpoint(root / "ours", STEP, engine, {}, context)
        result["save_bytes"] = size_of(path)
        fresh(root / "torch").mkdir()
        with clock(times["torch"]):
            torch.save(state_of(engine), root / "torch/state.pt")
            force_to_disk(root / "torch")
        if deepspeed:
            fresh(root / "deepspeed")
            with clock(times["deepspeed"]):
                engine._engine.save_checkpoint(str(root / "deepspeed"), tag="step")
                force_to_disk(root / "deepspeed")
            result["deepspeed_bytes"] = size_of(root / "deepspeed")
        result |= save_beside_training(engine, context, root)
    return result | {"seconds": {name: statistics.median(found) for name, found in times.items() if found}}


def save_beside_training(engine: Engine, context: ParallelContext, root: Path) -> dict[str, float]:
    """Seconds that training waits for one asynchronous save, until it is committed, and how it slows the steps."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def work(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            a @ b
        return time.perf_counter() - start

    saver = Saver(fresh(root / "background"), engine, context, CheckpointConfig(asynchronous=True))
    count = max(1, int(200 * STEP_SECONDS / work(200)))
    undisturbed = work(count)
    begun = time.perf_counter()
    waited: list[float] = []
    with clock(waited):
        saver.save(STEP, {})
    steps = []
    while saver.saved_step != STEP:
        steps.append(work(count))  # forward and backward
        with clock(waited):
            engine.before_update()
            saver.poll()
    committed = time.perf_counter() - begun
    fresh(root / "background")
    return {"waited": sum(waited), "committed": committed, "slowed": sum(steps) - undisturbed * len(steps)}


CONVERT = """
import time
from deepspeed.checkpoint import ds_to_universal
arguments = ds_to_universal.parse_arguments()
start = time.perf_counter()
ds_to_universal.main(arguments)
print(time.perf_counter() - start)
"""


def convert(root: Path) -> float:
    drop_from_cache(root / "deepspeed")
    folders = [
        "--input_folder",
        str(root / "deepspeed/step"),
        "--output_folder",
        str(root / "deepspeed/universal"),
    ]
    # A separate process: it starts workers by fork, which threads of torch do not survive.
    command = [sys.executable, "-c", CONVERT, *folders, "--inject_missing_state"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_SECONDS)
    written: list[float] = []
    with clock(written):
        force_to_disk(root / "deepspeed/universal")
    return float(done.stdout.split()[-1]) + written[0]


# What the ranks of another layout load


def load_side(context: ParallelContext, directory: str, size: str, what: str) -> dict[str, float]:
    root, seconds = Path(directory), []  # type: tuple[Path, list[float]]
    engine = make_engine(configuration(size, context.world_size, what == "deepspeed"), context, num_losses=1)
    if context.is_main:
        drop_from_cache(root / what)
    context.barrier()
    if what == "ours":
        with clock(seconds):
            found = newest_valid(root / "ours", context)
        assert found is not None
        with clock(seconds):
            load_checkpoint(found, engine, context)
    else:
        with clock(seconds):
            engine._engine.load_checkpoint(str(root / "deepspeed"), tag="universal")
    return {"seconds": seconds[-1], "verify": seconds[0], "total": total_of(engine, context)}


def torch_load(root: Path) -> float:
    drop_from_cache(root / "torch")
    seconds: list[float] = []
    with clock(seconds):
        torch.load(root / "torch/state.pt", weights_only=True)
    return seconds[0]


# The table


def measure(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    options = str(root), arguments.size
    report("building the model")
    (saved,) = in_ranks(save_side, 1, *options, arguments.repeats, not arguments.without_deepspeed)
    if not arguments.without_deepspeed:
        report("converting with DeepSpeed")
        saved["seconds"]["convert"] = convert(root)
    loads = {}
    for name, ranks in (("same", 1), ("reshard", arguments.ranks)):
        report(f"loading, ranks: {ranks}")
        loads[name] = slowest(in_ranks(load_side, ranks, *options, "ours"), saved["total"])
    if not arguments.without_deepspeed:
        loads["deepspeed"] = slowest(
            in_ranks(load_side, arguments.ranks, *options, "deepspeed"), saved["total"]
        )
    return {"saved": saved, "loads": loads, "torch_load": torch_load(root)}


def slowest(results: list[dict[str, float]], total: float) -> dict[str, Any]:
    equal = all(
        abs(result["total"] - total) <= 1e-9 * abs(total) for result in results
    )  # sums in another order
    return {name: max(r[name] for r in results) for name in ("seconds", "verify")} | {"equal": equal}


def table(measured: dict[str, Any], ranks: int) -> Iterator[str]:
    saved, loads = measured["saved"], measured["loads"]
    seconds, size = saved["seconds"], 12 * saved["parameters"]
    rate = size / seconds["disk"] / 1e6
    yield f"{saved['parameters'] / 1e6:.1f} M parameters, {size / 1e9:.2f} GB of fp32 weights and moments."
    yield ""
    yield "| | seconds | MB/s | |"
    yield "|---|---|---|---|"

    def row(name: str, taken: float, note: str, total: int = size) -> str:
        return f"| {name} | {taken:.2f} | {total / taken / 1e6:,.0f} | {note} |"

    yield row("disk, sequential write with fsync", seconds["disk"], "")
    share = saved["save_bytes"] / seconds["save"] / 1e6 / rate
    yield row("save", seconds["save"], f"{share:.0%} of the disk's rate", saved["save_bytes"])
    stall = saved["waited"] / seconds["save"]
    yield row("save in the background: training waits", saved["waited"], f"{stall:.1%} of a save")
    slowed = f"concurrent steps lost {saved['slowed']:.2f} s"
    yield row("save in the background: until committed", saved["committed"], slowed)
    yield row("torch.save", seconds["torch"], "")
    if "deepspeed" in loads:
        note = "16-bit weights as well"
        yield row("DeepSpeed save_checkpoint", seconds["deepspeed"], note, saved["deepspeed_bytes"])
    for name, count in (("same", 1), ("reshard", ranks)):
        found = loads[name]
        both = found["verify"] + found["seconds"]
        arrived = "" if found["equal"] else ", STATE DIFFERS"
        yield row(f"verify and load, ranks: {count}", both, f"{found['verify']:.2f} s to verify{arrived}")
    yield row("torch.load", measured["torch_load"], "no checksums verified")
    if "deepspeed" in loads:
        found = loads["deepspeed"]
        both, ours = seconds["convert"] + found["seconds"], loads["reshard"]
        factor = both / (ours["verify"] + ours["seconds"])
        arrived = "" if found["equal"] else ", STATE DIFFERS"
        note = f"{seconds['convert']:.2f} s to convert; ours is {factor:.1f}x as fast{arrived}"
        yield row(f"DeepSpeed convert and load, ranks: {ranks}", both, note)


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="large", help="large: 335 M parameters (default)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes that load what one saved (default: 2)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repeats of every save; medians (default: 3)")
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="on the disk to measure (default: here)"
    )
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "ranks", "repeats")
    check_places(options.directory, options.json)
    root = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.directory))
    try:
        measured = measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("\n".join(table(measured, options.ranks)))
    if options.json:
        write_json(options.json, measured)
    return 0


if __name__ == "__main__":
    run_command(main)
