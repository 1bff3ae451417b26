#!/usr/bin/env python3
"""Check muP (`model.mup`): activations change by the same amount at every width; without it the change grows.

    python scripts/coordinate_check.py --config configs/tiny.yaml --output coordinate_check.png

Trains narrow and wide models of the configuration's proportions, with and without muP, some steps of fp32 on the same
random tokens, with the rate and optimizer of the configuration and without warmup. It measures by how much the outputs
of the blocks and the logits have changed on the first batch, in the mean of their sizes. For each a line has the change
at every width and the slope of its logarithm over that of the width: 0 is flat, 1 grows as the width. The muP base is
the configuration's, else the narrowest width.

Source: arXiv:2203.03466, section 8 and appendix D.1; microsoft/mup, its coordinate check.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, run_command
from data_utils.common.files import require_named, write_picture
from megatron_lite.config.model import ModelConfig, MupConfig
from megatron_lite.config.tree import Config, load_config

if TYPE_CHECKING:
    import torch

    from megatron_lite.engine.engine import Engine
    from megatron_lite.parallel.context import ParallelContext
    from megatron_lite.transformer.batch import Batch

WAYS = {"standard": False, "muP": True}
Changes = dict[str, list[float]]  # "block 1", ..., "logits" -> mean size of the change at each width


def at_width(model: ModelConfig, width: int, base: int | None) -> ModelConfig:
    """A model of the same proportions and number of heads. Args: base: the width of muP's base; None = without muP.

    Raises: ConfigError for a width that is no multiple of the heads.
    """

    def scaled(size: int | None) -> int | None:
        return None if size is None else max(1, size * width // model.hidden_size)

    head_dim, ffn_size = scaled(model.head_dim), scaled(model.ffn_size)
    wide = replace(model, hidden_size=width, mup=None, head_dim=head_dim, ffn_size=ffn_size)
    if base is None:
        return wide
    return replace(
        wide, mup=MupConfig(base_hidden_size=base, base_head_size=max(1, wide.head_size * base // width))
    )


def outputs(engine: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    """The outputs of blocks and head for a batch, without dropout."""
    import torch

    from megatron_lite.transformer.residual import Residual, materialize

    model: Any = engine.model  # type: ignore[attr-defined]
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            found[name] = materialize(output) if isinstance(output, Residual) else output

        return hook

    hooks = [
        layer.register_forward_hook(keep(f"block {number}")) for number, layer in enumerate(model.layers, 1)
    ]
    hooks.append(model.heads.register_forward_hook(lambda _, __, output: found.update(rows=output[0])))
    prepared = engine.prepared(batch, None).to(engine.context.device)
    with torch.no_grad():
        model(prepared)
        words = model.embedding.word_embeddings
        found["logits"] = model.heads.vocabulary_logits(
            found.pop("rows"), words, len(prepared.loss_positions.boundaries)
        )
    for hook in hooks:
        hook.remove()
    found["logits"] = found["logits"][..., : words.local_vocab]
    return found


def changes(context: ParallelContext, config: Config, steps: int) -> dict[str, float]:
    """Mean size of the change of each output on the first batch, after some steps."""
    import numpy as np

    from data_utils.common.batch_fields import WEIGHTS
    from data_utils.objectives import LOSS_NAMES
    from megatron_lite.engine.plain import make_engine
    from megatron_lite.estimate.batches import random_batches
    from megatron_lite.transformer.attention_choice import set_attention

    batches = random_batches(config, steps)
    set_attention(config, context.device)
    engine = make_engine(config, context, len(LOSS_NAMES))
    before = outputs(engine, batches[0])
    for number, batch in enumerate(batches, 1):
        engine.set_step(number)
        factor = 1.0 / int(np.count_nonzero(batch.fields[:, WEIGHTS]))
        engine.train_step([engine.prepared(batch, None, factor)], config.optimizer.lr)
    after = outputs(engine, batches[0])
    return {name: (after[name] - before[name]).abs().mean().item() for name in before}


def check(
    context: ParallelContext, config: Config, widths: Sequence[int], steps: int, seeds: int, is_mup: bool
) -> Changes:
    """The changes at each width, in the mean of the seeds."""
    base = widths[0] if config.model.mup is None else config.model.mup.base_hidden_size
    found: Changes = {}
    for width in widths:
        model = at_width(config.model, width, base if is_mup else None)
        runs = [
            changes(
                context, replace(config, model=model, training=replace(config.training, seed=seed)), steps
            )
            for seed in range(1, seeds + 1)
        ]
        for name in runs[0]:
            found.setdefault(name, []).append(statistics.mean(run[name] for run in runs))
    return found


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """The p of value ~ width^p that is nearest, by least squares of logarithms."""
    logs = [math.log(value) if value > 0 else -math.inf for value in values]
    return statistics.linear_regression(list(map(math.log, widths)), logs).slope


def draw(found: dict[str, Changes], widths: Sequence[int], path: Path) -> None:
    """A panel for each way, a line for each output. Raises DataError if the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found), figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, (title, lines) in zip(panels, found.items(), strict=True):
        for name, values in lines.items():
            axes.plot(widths, values, "o-", label=f"{name}: {slope(widths, values):+.2f}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("width")
        axes.set_title(title)
        axes.legend(title="slope", fontsize=8)
    panels[0].set_ylabel("mean absolute change")
    write_picture(path, figure, "--output", dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "YAML file; repeatable, later files override earlier ones"
    add("--config", type=expanded_path, action="append", default=[], metavar="FILE", help=text)
    add(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512],
        help="hidden sizes, narrowest first (default: 64 to 512)",
    )
    add("--steps", type=int, default=3, help="steps of each run (default: 3)")
    add("--seeds", type=int, default=3, help="runs per width (default: 3)")
    add("--output", type=Path, metavar="FILE", help="plot the changes to this file")
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the files")
    options = parser.parse_intermixed_args(arguments)
    if not options.config:
        raise ConfigError("no configuration given; pass --config FILE (see configs/).")
    if len(set(options.widths)) < 2 or min(options.widths) < 1:
        raise ConfigError(f"--widths is {options.widths}; it must be at least two widths, narrowest first.")
    for name in ("steps", "seeds"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be at least 1.")
    if options.output:
        require_named(options.output, "--output")
    config = load_config(options.config, [*options.overrides, "training.precision=fp32"])
    from megatron_lite.estimate.step_estimate import with_vocabulary
    from megatron_lite.parallel.context import initialize
    from megatron_lite.parallel.launch import Launch, prepare_environment

    config = with_vocabulary(config)

    prepare_environment(config.training.deterministic)
    context = initialize(Launch(0, 1, 0), config.parallel, 600.0)
    found = {}
    for title, is_mup in WAYS.items():
        found[title] = check(context, config, options.widths, options.steps, options.seeds, is_mup)
        for name, values in found[title].items():
            sizes = "  ".join(
                f"{width}: {value:.4f}" for width, value in zip(options.widths, values, strict=True)
            )
            print(f"{title:8}  {name:9}  {sizes}  slope {slope(options.widths, values):+.2f}", flush=True)
    if options.output:
        draw(found, options.widths, options.output)


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
