"""Uses what the changes of docs/changes.md add, in a copy of the project: `use_changes.py PART COPY SETTINGS`.

PART is `text` (what needs no torch) or `training`. SETTINGS is the JSON of a very small run. The last line of stdout is
JSON: the name of each change -> what it did.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def fasttext_file(directory: Path) -> dict:
    from data_utils.common.errors import DataError
    from data_utils.tasks.config import TaskConfig
    from data_utils.tasks.readers.by_name import read_records

    config = TaskConfig(name="mine", kind="classification", reader="fasttext", labels=("bad", "good"))
    path = directory / "samples.txt"
    path.write_text("__label__good a fine film\n__label__bad no plot\n")
    found = [(record.fields["text_a"], record.label) for record in read_records(config, path, labelled=True)]
    path.write_text("__label__good a fine film\ngood another one\n")
    try:
        read_records(config, path, labelled=True)
    except DataError as error:
        return {"records": found, "error": str(error).removeprefix(f"{path}")}
    return {"records": found}


def flux() -> dict:
    from megatron_lite.parallel.launch import Launch, is_first_of_node

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        os.environ.pop(name, None)
    variables = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}
    os.environ.update(variables, MASTER_ADDR="node1", MASTER_PORT="15000")
    launch = Launch.from_environment()
    place = [launch.rank, launch.world_size, launch.local_rank, is_first_of_node()]
    for name in (*variables, "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    alone = Launch.from_environment()
    return {"place": place, "alone": [alone.rank, alone.world_size]}


def word_class() -> dict:
    from data_utils.tasks.metrics.metrics_by_task import task_metrics
    from support.task_inputs import record, renderer, tokenizer

    made = renderer("blank_infilling", labels=("noun", "verb"), kind="word_class")
    made.check()
    sample = made.sample(record(text_a="the river runs north", text_b="runs", label="verb"), 0)
    (part,) = sample.target_groups
    token = sample.documents[0].tokens[part.positions[0]]
    return {
        "word": tokenizer().token_to_text(token),
        "class": part.targets.tolist(),
        "answers": made.prediction_type,
        "metrics": task_metrics(made.inputs.config).names,
    }


def characters(directory: Path) -> dict:
    from data_utils.tokenizers.tokenizer import load_tokenizer
    from data_utils.tokenizers.tokenizer_readers import TokenizerConfig

    (directory / "characters.txt").write_text("abc de\n")
    made = load_tokenizer(TokenizerConfig(kind="characters", path=str(directory)))
    ids = made.encode("bad cab\U0001f600")
    return {"ids": ids, "text": made.decode(ids[:-1]), "unknown": made.special.unk}


def train(settings: dict) -> dict:
    """Two starts of one run, of two steps each, with the new norm, activation, optimizer and schedule."""
    from megatron_lite.checkpoint.trainer_state import TrainerState
    from megatron_lite.config.sections import ParallelConfig
    from megatron_lite.parallel.context import initialize
    from megatron_lite.parallel.launch import Launch
    from support.training import make_trainer

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    context = initialize(Launch.from_environment(), ParallelConfig(), timeout_seconds=60)
    settings["model"] |= {"dynamic_tanh": True, "activation": "relu_squared"}
    settings["schedule"] = {"kind": "stable", "warmup_steps": 1, "decay_steps": 3}
    settings["optimizer"] |= {"kind": "lion"}
    settings["training"] |= {"steps": 4, "stop_after_step": 2}
    first = make_trainer(context, settings)
    names = sorted(first.engine.named_parameters)
    first.fit()
    settings["training"].pop("stop_after_step")
    second = make_trainer(context, settings)
    second._resume()
    resumed = [first.progress.predicted_tokens, second.progress.predicted_tokens]
    second.fit()
    older = second._state()
    del older["predicted_tokens"]
    lines = (Path(settings["run"]["directory"]) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return {
        "parameters": names,
        "predicted": [*resumed, second.progress.predicted_tokens],
        "older": TrainerState.from_json(older, Path("older")).predicted_tokens,
        "records": records,
        "kinds": sorted(next(iter(first.engine.fragments())).tensors),
    }


def lion() -> dict:
    """Two steps and the same by the paper, the memory of the dry run, and a setting that is not read."""
    import torch
    from torch import nn

    from data_utils.common.errors import ConfigError
    from data_utils.common.settings import build
    from megatron_lite.config.sections import OptimizerConfig
    from megatron_lite.estimate.average_sequence import average_sequence
    from megatron_lite.estimate.gpus import GPUS
    from megatron_lite.estimate.step_estimate import estimate
    from support.optimizers import Ours
    from support.step_profiles import PAPER, config_of

    settings = {"kind": "lion", "beta2": 0.99, "weight_decay": 0.1}
    torch.manual_seed(0)
    weights, *gradients = torch.randn(3, 4, 6).unbind()
    name, lr = "layers.0.dense.weight", 0.01
    ours = Ours({name: nn.Parameter(weights.clone())}, build(OptimizerConfig, settings))
    momentum = torch.zeros_like(weights)
    for gradient in gradients:
        ours.step({name: gradient}, lr)
        weights -= lr * ((0.9 * momentum + 0.1 * gradient).sign() + 0.1 * weights)
        momentum = 0.99 * momentum + 0.01 * gradient
    before = ours.state()
    ours.step({name: gradients[0] * float("inf")}, lr, found_inf=1.0)
    try:
        error = str(build(OptimizerConfig, settings | {"eps": 0.01}))
    except ConfigError as refusal:
        error = str(refusal)
    config = config_of(PAPER, 1, 1, ("optimizer.kind=lion",))
    found = estimate(config, 1, GPUS["h100"], average_sequence(config))
    return {
        "ours": ours.weights()[name].flatten().tolist(),
        "paper's": weights.flatten().tolist(),
        "unchanged by infinite gradients": all(map(torch.equal, before, ours.state())),
        "bytes": found.peak.optimizer / found.rank_parameters,
        "error": error,
    }


def interpreted_kernel() -> dict:
    """The largest difference of the kernel's result, and of its gradient, from torch's in fp64."""
    import torch

    from megatron_lite.model.kernels.fused import activated
    from support.kernels import interpreted_kernels

    x = torch.randn(11, 72, generator=torch.Generator().manual_seed(0), requires_grad=True)
    wide = x.detach().double().requires_grad_()
    torch_values = activated(wide, "relu_squared")
    with interpreted_kernels():
        values = activated(x, "relu_squared")
        values.sum().backward()
    torch_values.sum().backward()
    return {
        "is_kernel": type(values.grad_fn).__name__ != type(torch_values.grad_fn).__name__,
        "differences": [(values - torch_values).abs().max().item(), (x.grad - wide.grad).abs().max().item()],
    }


def main() -> None:
    part, copy, settings = sys.argv[1:]
    sys.path[:1] = [copy, str(TESTS)]
    directory = Path(copy)
    if part == "text":
        found = {
            "reader": fasttext_file(directory),
            "launcher": flux(),
            "kind of task": word_class(),
            "tokenizer": characters(directory),
            "is light": "torch" not in sys.modules,
        }
    else:
        found = {"training": train(json.loads(settings)), "kernel": interpreted_kernel(), "optimizer": lion()}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
