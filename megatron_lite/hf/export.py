"""Exports a training checkpoint, saved under any parallel configuration, as a Hugging Face directory.

`export_run` picks the format: of a model with a spec (model_format.py), the class of a published system
(published/runs.py), GLM's own class, or the layout of the released GLM checkpoints (glm/export.py).

Tensors are streamed; only the proof holds a whole model. The output directory is renamed into place when everything,
the proof included, has succeeded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import checked, setting
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.config.tree import Config
from megatron_lite.hf.adapters import write_adapter
from megatron_lite.hf.files import proof
from megatron_lite.hf.files.lora import merged, own_modules, split_updates, without_updates
from megatron_lite.hf.files.proof_report import Report, write_report
from megatron_lite.hf.files.weights import DTYPES, Weights, check_shapes, new_directory
from megatron_lite.hf.glm.export import (
    prove_glm,
    prove_released,
    require_glm,
    require_released,
    write_glm,
    write_released,
)
from megatron_lite.hf.model_format import format_of_run
from megatron_lite.hf.published.runs import prove_published, write_published
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.inference.open_run import OpenRun, open_run
from megatron_lite.transformer.flops import parameter_shapes


@dataclass(frozen=True, kw_only=True)
@checked("")
class ExportOptions:
    """Format of an export, and how it is verified."""

    layout: str = setting(
        "huggingface",
        "huggingface, or released (tensor names and vocabulary order of the released GLM checkpoints).",
        one_of=("huggingface", "released"),
    )
    dtype: str = setting("fp32", "Data type of the exported weights.", one_of=tuple(DTYPES))
    max_shard_bytes: int = setting(
        5 * 10**9, "Maximum size of a weight file in bytes; a single tensor may exceed it.", at_least=1
    )
    verify: bool = setting(True, "Run both models and compare their logits.")
    tolerance: float = setting(proof.TOLERANCE, "Maximum logit difference that passes verification.")
    adapter: bool = setting(
        False, "Write the updates of LoRA alone, as files of peft, instead of merging them."
    )


def export_run(
    path: Path,
    output: Path,
    options: ExportOptions,
    tokenizer_path: Path | None = None,
    decoder_tokenizer_path: Path | None = None,
) -> proof.Proof | None:
    """Write the model of a run directory, or of one of its checkpoints, as a Hugging Face directory.

    Returns: None without `options.verify`. Raises: CheckpointError, DataError or ConfigError; `output` then does not
    exist.
    """
    with new_directory(output) as directory:
        run = open_run(path, tokenizer_path, decoder_tokenizer_path)
        require_usual_logits(run.config, run.checkpoint.path)
        if run.config.model.task_head.heads:
            message = "has heads of several tasks; tune it on one (scripts/finetune.py --task FILE), and export that"
            raise CheckpointError(f"checkpoint {run.checkpoint.path} {message}.")
        prove = _write(directory, run, options)
        if prove is None:
            return None
        report = prove(options.dtype, options.tolerance) if options.verify else None
        write_report(directory, report)
        return None if report is None else proof.joined(report.comparisons)


def _write(directory: Path, run: OpenRun, options: ExportOptions) -> Callable[[str, float], Report] | None:
    """Write the run in the format of its model.

    Returns: the proof, a function of data type and tolerance; None for an adapter, which is no model.
    """
    checkpoint, model, is_released = run.checkpoint, run.config.model, options.layout == "released"
    # From the most special model to the most general one: a model with a spec is more than one Transformer.
    if (model_format := format_of_run(run.config)) is not None:
        if is_released:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} has {model_format.beyond_glm}, which the released layout does not "
                "have; use --layout huggingface."
            )
        if options.verify:
            model_format.require_provable(checkpoint.path)
        model_format.write(directory, run, options.dtype, options.max_shard_bytes)
        return partial(model_format.prove, run, directory)
    if model.task_head.has_pool:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has a head with model.task_head.pool {model.task_head.pool}, which no class "
            "of transformers has; only heads of one token (pool: token) can be exported."
        )
    is_published = model.system in SYSTEMS_BY_NAME and not is_released
    plain = replace(run, config=without_updates(run.config))  # updates of LoRA are merged
    if not is_published:
        (require_released if is_released else require_glm)(plain)
    weights = Weights(checkpoint.shapes, weight_reader(checkpoint))
    check_shapes(weights, parameter_shapes(model), checkpoint.path)
    if options.adapter:
        write_adapter(directory, run, weights, options.dtype)
        return None
    if is_published:
        class_name = write_published(directory, weights, run, options.dtype, options.max_shard_bytes)
        return partial(prove_published, run, directory, class_name)
    if model.lora is not None:
        base, updates = split_updates(weights)
        weights = merged(base, updates, own_modules(model, lambda name: name), model.lora)
    write, prove = (write_released, prove_released) if is_released else (write_glm, prove_glm)
    write(directory, weights, plain, options.dtype, options.max_shard_bytes)
    return partial(prove, run, directory)


def require_usual_logits(config: Config, path: Path) -> None:
    """Raise CheckpointError for logits with a soft cap or muP's factors, which no class written here computes."""
    stacks = (("model", config.model), ("decoder", config.decoder))
    for (name, model), option in itertools.product(stacks, ("logit_soft_cap", "mup")):
        if model is not None and getattr(model, option) is not None:
            raise CheckpointError(
                f"checkpoint {path} has {name}.{option}, which the class of transformers has not; use the run itself, "
                "with scripts/generate.py and scripts/evaluate.py."
            )
