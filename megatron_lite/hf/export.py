"""Exports a training checkpoint, saved under any parallel configuration, as a Hugging Face directory.

Tensors are streamed; only the comparison of outputs holds a whole model. The output directory is renamed into place
when everything, the comparison included, has succeeded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import checked, setting
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.config.tree import Config
from megatron_lite.hf.adapters import write_adapter
from megatron_lite.hf.common.verify import TOLERANCE, Comparison, compare_outputs, joined
from megatron_lite.hf.common.verify_report import Report, write_report
from megatron_lite.hf.common.weights import DTYPES, Weights, check_shapes, new_directory
from megatron_lite.hf.formats import format_of_run
from megatron_lite.hf.sentence_transformers import compare_vectors, write_modules
from megatron_lite.inference.open_run import open_run
from megatron_lite.transformer.build import model_spec


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
    tolerance: float = setting(TOLERANCE, "Maximum logit difference that passes verification.")
    adapter: bool = setting(
        False, "Write the updates of LoRA alone, as files of peft, instead of merging them."
    )
    sentence_transformers: bool = setting(
        False, "Write what sentence-transformers needs to make vectors as the section embedding says."
    )


def export_run(
    path: Path,
    output: Path,
    options: ExportOptions,
    tokenizer_path: Path | None = None,
    decoder_tokenizer_path: Path | None = None,
) -> Comparison | None:
    """Write the model of a run directory, or of one of its checkpoints, as a Hugging Face directory.

    Returns: None without `options.verify`, and for an adapter, which is no model. Raises: CheckpointError, DataError or
    ConfigError; `output` then does not exist.
    """
    with new_directory(output) as directory:
        run = open_run(path, tokenizer_path, decoder_tokenizer_path)
        _require_exportable(run.config, run.checkpoint.path)
        model_format = format_of_run(run.config, options.layout)
        if options.verify:
            model_format.require_verifiable(run.checkpoint.path)
        model_format.require_model(run)
        weights = Weights(run.checkpoint.shapes, weight_reader(run.checkpoint))
        check_shapes(weights, model_spec(run.config).shapes(run.config), run.checkpoint.path)
        if options.adapter:
            write_adapter(directory, run, weights, options.dtype)
            return None
        checks = model_format.write(directory, run, weights, options.dtype, options.max_shard_bytes)
        if options.sentence_transformers:
            write_modules(directory, run)
        if not options.verify:
            write_report(directory, None)
            return None
        assert checks is not None  # `require_verifiable`
        tokenizers = model_format.compare_tokenizers(run, directory)
        comparisons = compare_outputs(
            checks,
            lambda: model_format.load(run, DTYPES[options.dtype]),
            options.tolerance,
            f"the export of {run.checkpoint.path}",
            run.checkpoint.shapes,
        )
        if options.sentence_transformers:
            comparisons |= compare_vectors(run, directory, options.tolerance, options.dtype, is_ours=True)
        write_report(directory, Report(comparisons, options.tolerance, tokenizers))
        return joined(comparisons)


def _require_exportable(config: Config, path: Path) -> None:
    """Raise CheckpointError for what no format has."""
    require_plain_logits(config, path)
    if config.model.task_head.heads:
        raise CheckpointError(
            f"checkpoint {path} has heads of several tasks; tune it on one (scripts/finetune.py --task FILE), and "
            "export that."
        )
    if config.model.task_head.has_pool:
        raise CheckpointError(
            f"checkpoint {path} has a head with model.task_head.pool {config.model.task_head.pool}, which no class of "
            "transformers has; only heads of one token (pool: token) can be exported."
        )


def require_plain_logits(config: Config, path: Path) -> None:
    """Raise CheckpointError for logits with a soft cap or muP's factors, which no class written here computes."""
    stacks = (("model", config.model), ("decoder", config.decoder))
    for (name, model), option in itertools.product(stacks, ("logit_soft_cap", "mup")):
        if model is not None and getattr(model, option) is not None:
            raise CheckpointError(
                f"checkpoint {path} has {name}.{option}, which the class of transformers has not; use the run itself, "
                "with scripts/generate.py and scripts/evaluate.py."
            )
