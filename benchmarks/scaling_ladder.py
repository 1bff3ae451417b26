#!/usr/bin/env python3
"""Does a larger model learn more from the same text, and which rate does each width need?

    bash scripts/quickstart.sh
    python benchmarks/scaling_ladder.py --plot scaling_ladder.png

Trains the recipe of configs/tiny.yaml on the quickstart's corpus at several widths, 2 blocks each, all on the same
tokens. At each width the rate begins with the same value, and is halved or doubled until that makes validation worse,
so the best one has a worse one on both sides. Two tables show the loss over parameters and tokens, with each width's
best rate and with one rate for all, and the best rate by width.

Each finished run is a file of --work, so the same command goes on after an interruption, or draws again what it has.
Several commands with different --widths may share --work; the last one, with all of them, then only reads.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
from benchmarks.arguments import check_at_least, write_json
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_directory, require_named, write_picture
from data_utils.common.setting_files import load_json
from megatron_lite.config.tree import load_config
from megatron_lite.model.flops import parameter_count

ROOT = Path(__file__).resolve().parents[1]
LOSSES = {"loss": "all", "loss/token": "short spans", "loss/document": "long spans"}
HEAD = 64  # features of a head
EVALUATIONS = 4  # of a run
Run = dict[str, Any]  # what `measured` writes


def settings_of(options: Any, run: Path, seed: int, evaluations: int) -> list[str]:
    """Settings on top of the file: `options` has quickstart (a directory), steps and samples (of a validation)."""
    data = options.quickstart.resolve()
    return [
        f"tokenizer.path={data / 'tokenizer/tokenizer.json'}",
        f"data.train=[{{prefix: {data / 'data/corpus_train'}}}]",
        f"data.validation=[{{prefix: {data / 'data/corpus_validation'}}}]",
        f"training.steps={options.steps}",
        f"training.eval_interval={max(1, options.steps // evaluations)}",
        f"training.eval_samples={options.samples}",
        f"training.seed={seed}",
        "checkpoint.save_interval=0",
        "run.tensorboard=false",
        "run.peak_tflops=1",
        f"run.directory={run}",
    ]


def train(run: Path, settings: Sequence[str], threads: int | None) -> list[dict[str, float]]:
    """Train configs/tiny.yaml with settings on top, and return the step and losses of each validation.

    Raises: DataError if the run fails.
    """
    command = [sys.executable, "pretrain_glm.py", "--config", "configs/tiny.yaml", *settings]
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise DataError(f"{run.name} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {name: line[name] for name in ("step", *LOSSES)} for line in lines if line["kind"] == "validation"
    ]


def sizes_of(width: int, options: Any) -> list[str]:
    """Settings of the model of a width, on top of tiny.yaml."""
    sizes = [f"model.hidden_size={width}", f"model.num_attention_heads={width // HEAD}"]
    base = f"model.mup={{base_hidden_size: {options.mup}, base_head_size: {HEAD}}}"
    return [*sizes, base] if options.mup else sizes


def measured(options: Any, width: int, rate: float, seed: int) -> Run:
    """A run, which is trained now or was before. `seconds` are of the CPU, on all threads. Raises DataError."""
    corpus = load_json(options.quickstart / "data/corpus_train.json", "manifest")
    of = {"steps": options.steps, "samples": options.samples, "corpus": str(corpus["checksum"])[:12]}
    form = f"mup{options.mup}_" if options.mup else ""
    file = options.work / f"{form}{width}_{rate:g}_{seed}_{'_'.join(map(str, of.values()))}.json"
    if file.exists():
        return load_json(file, "finished run")
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / file.stem
        settings = [
            *settings_of(options, run, seed, EVALUATIONS),
            *sizes_of(width, options),
            f"optimizer.lr={rate}",
        ]
        settings.append(f"schedule.warmup_steps={max(1, options.steps // 10)}")
        config = load_config([ROOT / "configs/tiny.yaml"], settings).with_vocab_size(corpus["vocab_size"])
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        curve = train(run, settings, options.threads)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    result = {**of, "width": width, "rate": rate, "seed": seed, "parameters": parameter_count(config.model)}
    result["tokens"] = config.batch.global_batch_size * config.data.sequence_length * options.steps
    result |= {"seconds": round(seconds), "curve": curve}
    write_json(file, result)
    print(f"{file.stem}: {curve[-1]['loss']:.4f}, {seconds:.0f} CPU seconds", flush=True)
    return result


def loss_of(runs: Sequence[Run], name: str = "loss", point: int = -1) -> float:
    """The loss at a validation, by default the last one, in the mean of the seeds."""
    return statistics.mean(run["curve"][point][name] for run in runs)


def descend(start: float, loss: Callable[[float], float]) -> list[float]:
    """Rates a factor of 2 apart, rising: the best one with a worse one on both sides, and those on the way to it."""
    rates = [start / 2, start]
    while loss(rates[0]) < loss(rates[1]):
        rates.insert(0, rates[0] / 2)
    if len(rates) == 2:
        rates.append(2 * start)
        while loss(rates[-1]) < loss(rates[-2]):
            rates.append(2 * rates[-1])
    return rates


def lowest(rates: Sequence[float], loss: Callable[[float], float]) -> float:
    """Where a parabola through the best rate and its neighbours is lowest, over the logarithm of the rate."""
    at = min(range(1, len(rates) - 1), key=lambda number: loss(rates[number]))
    left, middle, right = (loss(rate) for rate in rates[at - 1 : at + 2])
    return rates[at] * 2 ** ((left - right) / (2 * (left - 2 * middle + right)))


def exponent(widths: Sequence[int], rates: Sequence[float]) -> float:
    """The p of rate ~ width^p that is nearest to these, by least squares of logarithms."""
    x, y = [math.log(width) for width in widths], [math.log(rate) for rate in rates]
    return statistics.linear_regression(x, y).slope


Ladder = Mapping[int, Mapping[float, Sequence[Run]]]  # width -> rate -> runs of the seeds


def best_rate(of_rates: Mapping[float, Sequence[Run]]) -> float:
    return min(of_rates, key=lambda rate: loss_of(of_rates[rate]))


def tables(ladder: Ladder, common: float) -> str:
    """The measured losses as two tables and the exponent of the rates."""
    first = next(iter(ladder.values()))[common][0]
    quarters = [first["tokens"] * point["step"] // first["steps"] for point in first["curve"]]
    names = " | ".join(f"{tokens:,} tokens" for tokens in quarters)
    ends = " | ".join(f"{text}, end" for text in list(LOSSES.values())[1:])
    lines = [
        f"| width | parameters | rate | {names} | {ends} | CPU s |",
        f"|---|---|---|{'---|' * (len(quarters) + 3)}",
    ]
    for width, of_rates in ladder.items():
        for rate in dict.fromkeys((best_rate(of_rates), common)):
            runs = of_rates[rate]
            cells = [f"{loss_of(runs, point=number):.3f}" for number in range(len(quarters))]
            cells += [f"{loss_of(runs, name):.3f}" for name in list(LOSSES)[1:]]
            seconds = statistics.mean(run["seconds"] for run in runs)
            name = "best" if rate != common else "for all" if rate != best_rate(of_rates) else "best, for all"
            about = f"| {width} | {runs[0]['parameters'] / 1e6:.2f} M | {rate:g}, {name} |"
            lines.append(f"{about} {' | '.join(cells)} | {seconds:.0f} |")
    lines += [
        "",
        "| width | validation loss at each rate | lowest between them, by a parabola |",
        "|---|---|---|",
    ]
    between = {}
    for width, of_rates in ladder.items():
        loss = {rate: loss_of(of_rates[rate]) for rate in sorted(of_rates)}
        between[width] = lowest(list(loss), loss.__getitem__)
        found = ", ".join(f"{rate:g}: {value:.3f}" for rate, value in loss.items())
        lines.append(f"| {width} | {found} | {between[width]:.1e} |")
    if len(between) > 1:
        lines += ["", f"rate ~ width^{exponent(list(between), list(between.values())):.2f}"]
    return "\n".join(lines)


def draw(ladder: Ladder, common: float, path: Path) -> None:
    """Loss over rates, over tokens, and over parameters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_rate, by_tokens, by_size) = pyplot.subplots(1, 3, figsize=(11, 3.6), sharey=False)
    for number, (width, of_rates) in enumerate(ladder.items()):
        rates, best, colour = sorted(of_rates), best_rate(of_rates), f"C{number}"
        name = f"width {width}, {of_rates[best][0]['parameters'] / 1e6:.1f} M"
        by_rate.plot(rates, [loss_of(of_rates[rate]) for rate in rates], "o-", color=colour, label=name)
        by_rate.plot(best, loss_of(of_rates[best]), "o", color=colour, markersize=11, fillstyle="none")
        run = of_rates[best][0]
        tokens = [run["tokens"] * point["step"] / run["steps"] / 1e6 for point in run["curve"]]
        curve = [loss_of(of_rates[best], point=number) for number in range(len(tokens))]
        by_tokens.plot(tokens, curve, "o-", color=colour, label=f"{name}, rate {best:g}")
    sizes = [next(iter(of_rates.values()))[0]["parameters"] for of_rates in ladder.values()]
    own = [loss_of(of_rates[best_rate(of_rates)]) for of_rates in ladder.values()]
    by_size.plot(sizes, own, "o-", color="black", label="best rate of each")
    one = [loss_of(of_rates[common]) for of_rates in ladder.values()]
    by_size.plot(sizes, one, "s--", color="grey", label=f"rate {common:g} for all")
    for axes, text in (
        (by_rate, "learning rate; a circle: the best"),
        (by_tokens, "million tokens of text"),
        (by_size, "parameters"),
    ):
        axes.set_xlabel(text)
        axes.legend(fontsize=7)
    tried = sorted({rate for of_rates in ladder.values() for rate in of_rates})
    for axes, places, names in (
        (by_rate, tried, [f"{rate:g}" for rate in tried]),
        (by_size, sizes, [f"{size / 1e6:.1f} M" for size in sizes]),
    ):
        axes.set_xscale("log")
        axes.set_xticks(places, names)
        axes.set_xticks([], minor=True)
    by_rate.set_ylabel("validation loss (nats per token)")
    figure.tight_layout()
    write_picture(path, figure, "--plot", dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--quickstart", type=Path, default=ROOT / "quickstart", help="what scripts/quickstart.sh wrote")
    add("--widths", type=int, nargs="+", default=[128, 256, 512], help="multiples of 64, narrowest first")
    add("--rate", type=float, default=4e-3, help="first learning rate to try (default: 4e-3)")
    add("--steps", type=int, default=300, help="of each run, 2,048 tokens of text each (default: 300)")
    add("--samples", type=int, default=512, help="of a validation (default: 512)")
    add("--seeds", type=int, nargs="+", default=[1])
    add("--mup", type=int, metavar="WIDTH", help="with model.mup, whose base has this width")
    add("--threads", type=int, default=None)
    add("--work", type=Path, help="directory of finished runs (default: scaling_ladder in --quickstart)")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    check_at_least(options, HEAD, "widths", "mup")
    check_at_least(options, EVALUATIONS, "steps")
    check_at_least(options, 1, "samples", "threads")
    check_at_least(options, 1e-6, "rate")
    check_at_least(options, 0, "seeds")
    if options.plot is not None:
        require_named(options.plot, "--plot")
    require_directory(
        options.quickstart / "data", "run scripts/quickstart.sh, or give --quickstart its directory"
    )
    options.work = options.work or options.quickstart / "scaling_ladder"
    ladder: dict[int, dict[float, list[Run]]] = {}
    for width in sorted(options.widths):
        own = ladder.setdefault(width, {})

        def loss(rate: float, width: int = width, own: dict[float, list[Run]] = own) -> float:
            if rate not in own:
                own[rate] = [measured(options, width, rate, seed) for seed in options.seeds]
            return loss_of(own[rate])

        descend(options.rate, loss)
    print(tables(ladder, options.rate))
    if options.plot is not None:
        draw(ladder, options.rate, options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
