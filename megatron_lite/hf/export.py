"""Exports a training checkpoint, saved under any parallel configuration, as a Hugging Face directory.

`export_run` picks the path: a class of transformers for a published system, GLM's own class, or the layout of the
released GLM checkpoints. hf/__init__.py lists the files of each.

Tensors are streamed; only the proof holds a whole model. The output directory is renamed into place when everything,
the proof included, has succeeded. Rows that pad the vocabulary take no part in training: an import from the released
layout keeps them in a file of the run directory, and an export to that layout takes them from there (zeros where a run
has none).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import checked, setting
from data_utils.tasks.readers.by_name import task_labels
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.config.tree import Config
from megatron_lite.hf.adapters import write_adapter
from megatron_lite.hf.files import proof
from megatron_lite.hf.files.config_json import OwnLayout, write_config
from megatron_lite.hf.files.lora import (
    exported_name,
    merged,
    merged_here,
    own_modules,
    split_updates,
    without_updates,
)
from megatron_lite.hf.files.model_card import model_card
from megatron_lite.hf.files.proof import Question
from megatron_lite.hf.files.proof_report import Report, write_report
from megatron_lite.hf.files.recipe import write_recipe
from megatron_lite.hf.files.tokenizer_proof import prove_exported
from megatron_lite.hf.files.weights import (
    DTYPES,
    PADDING_ROWS,
    WORDS,
    Weights,
    check_shapes,
    new_directory,
    open_directory,
    open_safetensors,
    write_json,
    write_sharded,
)
from megatron_lite.hf.glm import proof as glm_proof
from megatron_lite.hf.glm import released
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.tokenizer_files import prove_tokenizer, write_tokenizer
from megatron_lite.hf.model_format import format_of_run
from megatron_lite.hf.published import proof as published_proof
from megatron_lite.hf.published.heads import SEVERAL_LABELS
from megatron_lite.hf.published.runs import trained_template, write_published
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.inference.open_run import OpenRun, filled, load_model, objective_names, open_run
from megatron_lite.model.flops import parameter_shapes
from megatron_lite.model.transformer import GLM

_CODE = [f"{name}_glm.py" for name in ("configuration", "positions", "modeling", "tokenization", "pipeline")]
_AUTO_MAP = {
    "AutoConfig": "configuration_glm.GLMConfig",
    "AutoModel": "modeling_glm.GLMModel",
    "AutoModelForSeq2SeqLM": "modeling_glm.GLMForBlankInfilling",
    "AutoModelForSequenceClassification": "modeling_glm.GLMForSequenceClassification",
    "AutoModelForMultipleChoice": "modeling_glm.GLMForMultipleChoice",
}
_PIPELINES = {
    "blank-infilling": {
        "impl": "pipeline_glm.BlankInfillingPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}


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
        # From the most special model to the most general one; each has its writer and its proof.
        require_usual_logits(run.config, run.checkpoint.path)
        if run.config.model.task_heads:
            message = "has heads of several tasks; tune it on one (scripts/finetune.py --task FILE), and export that"
            raise CheckpointError(f"checkpoint {run.checkpoint.path} {message}.")
        if (model_format := format_of_run(run.config)) is not None:
            if options.layout == "released":
                raise CheckpointError(
                    f"checkpoint {run.checkpoint.path} has {model_format.beyond_glm}, which the released layout does "
                    "not have; use --layout huggingface."
                )
            if options.verify:
                model_format.require_provable(run.checkpoint.path)
            model_format.write(directory, run, options.dtype, options.max_shard_bytes)
            return _prove_and_report(
                directory,
                options,
                lambda: model_format.prove(run, directory, options.dtype, options.tolerance),
            )
        _check_exportable(run, options.layout)
        checkpoint, model = run.checkpoint, run.config.model
        weights = Weights(checkpoint.shapes, weight_reader(checkpoint))
        check_shapes(weights, parameter_shapes(model), checkpoint.path)
        if options.adapter:
            write_adapter(directory, run, weights, options.dtype)
            return None
        # A published system goes to its own class of transformers, everything else to GLM's classes, whose code
        # is copied into the export.
        if model.system in SYSTEMS_BY_NAME and options.layout == "huggingface":
            class_name = write_published(directory, weights, run, options.dtype, options.max_shard_bytes)
            return _prove_and_report(
                directory, options, lambda: _prove_published(directory, run, options, class_name)
            )
        if model.lora is not None:
            base, updates = split_updates(weights)
            weights = merged(base, updates, own_modules(model, lambda name: name), model.lora)
        if options.layout == "released":
            padded = _with_padding_rows(weights, model, checkpoint.path.parent.parent / PADDING_ROWS)
            _write_released(directory, padded, model, options)
        else:
            _write_huggingface(directory, weights, run, options)
            plain = replace(run, config=without_updates(run.config))
            write_recipe(directory, plain)
            (directory / "README.md").write_text(model_card(plain), encoding="utf-8")
        return _prove_and_report(directory, options, lambda: _prove_export(directory, run, options))


def _prove_and_report(
    directory: Path, options: ExportOptions, prove: Callable[[], Report]
) -> proof.Proof | None:
    """Write the report of a proof into the directory. Returns: the proof, None without `options.verify`."""
    report = prove() if options.verify else None
    write_report(directory, report)
    return None if report is None else proof.joined(report.comparisons)


def require_usual_logits(config: Config, path: Path) -> None:
    """Raise CheckpointError for a checkpoint whose logits have a bound or muP's factors: no class written here does."""
    stacks = (("model", config.model), ("decoder", config.decoder))
    for (name, model), option in itertools.product(stacks, ("logit_soft_cap", "mup")):
        if model is not None and getattr(model, option) is not None:
            raise CheckpointError(
                f"checkpoint {path} has {name}.{option}, which the class of transformers has not; use the run itself, "
                "with scripts/generate.py and scripts/evaluate.py."
            )


# Options of blocks that GLM's Hugging Face classes support beyond GLM, with GLM's values.
_GLM_VALUES: dict[str, Any] = {
    "rms_norm": False, "ffn": "plain", "ffn_size": None, "biases": "all", "attention_window": 0, "global_every": 1,
    "rotary_base_local": None,
}  # fmt: skip


def _check_exportable(run: OpenRun, layout: str) -> None:
    path, names = run.checkpoint.path, objective_names(run.objectives)
    model = replace(run.config.model, lora=None)  # updates are merged
    if model.has_task_pool:
        raise CheckpointError(
            f"checkpoint {path} has a head with model.task_pool {model.task_pool}, which no class of transformers has; "
            "only heads of one token (task_pool token) can be exported."
        )
    if model.system in SYSTEMS_BY_NAME and layout == "huggingface":
        return
    # What GLM's classes support is set to GLM's values; what then is not plain, no class has.
    plain = replace(model, **_GLM_VALUES)
    if not plain.is_plain or model.biases not in ("all", "none"):
        raise CheckpointError(
            f"checkpoint {path} is of a model with options that GLM's Hugging Face classes do not have; only models of "
            f"GLM's own layers, or with model.system {', '.join(SYSTEMS_BY_NAME)}, can be exported."
        )
    if lacking := sorted({"cls", "mask", "sop", "eop", "eos"} & run.tokenizer.lacking):
        raise CheckpointError(
            f"the vocabulary of checkpoint {path} lacks {', '.join(lacking)}, with which GLM's classes fill blanks; "
            "only runs with tokenizer.added_tokens=glm can be exported."
        )
    for name, is_there in (
        ("the head of a task", model.task_head != "none"),
        ("rotary positions", model.positions == "rotary"),
        ("local layers, another norm or FFN, or no biases", plain != model),
    ):
        if layout == "released" and is_there:
            raise CheckpointError(
                f"checkpoint {path} has {name}, which the released layout does not have; use --layout huggingface."
            )
    if layout == "released" and "blank_infilling" not in names:
        raise CheckpointError(
            f"checkpoint {path} was trained on {', '.join(names)}, which the released layout, that of models that "
            "fill blanks, cannot say; use --layout huggingface."
        )


def _write_huggingface(directory: Path, weights: Weights, run: OpenRun, options: ExportOptions) -> None:
    config, tokenizer = run.config, run.tokenizer
    exported = weights.renamed({exported_name(name): name for name in weights.shapes})
    write_sharded(directory, exported, DTYPES[options.dtype], options.max_shard_bytes)
    class_config = glm_config(config.model, tokenizer.special, DTYPES[options.dtype])
    class_config.trained_objectives = objective_names(run.objectives)
    # In config.json too: `pipeline` of versions before 4.57 loads no tokenizer for a model that it does not know.
    class_config.tokenizer_class = write_tokenizer(tokenizer, directory, config.model.max_position + 1)
    if config.model.task_head != "none":
        _describe_head(class_config, run)
    write_config(directory, class_config, {})
    generation_config(tokenizer.special).save_pretrained(directory)
    for name in _CODE:
        shutil.copyfile(Path(glm_proof.__file__).with_name(name), directory / name)


def _describe_head(class_config: GLMConfig, run: OpenRun) -> None:
    task = run.config.task
    class_config.architectures = ["GLMForSequenceClassification"]
    if run.config.model.task_head == "values":
        class_config.num_labels = 1
        return
    names = () if task is None else task_labels(task)
    class_config.problem_type = SEVERAL_LABELS if task is not None and task.kind == "typing" else None
    class_config.id2label = dict(enumerate(names or map(str, range(run.config.model.task_classes))))
    class_config.label2id = {name: number for number, name in class_config.id2label.items()}


def _write_released(directory: Path, weights: Weights, config: ModelConfig, options: ExportOptions) -> None:
    write_sharded(
        directory, released.in_released_layout(weights), DTYPES[options.dtype], options.max_shard_bytes
    )
    config_json = {
        "model_type": "glm",
        "vocab_size": weights.shapes[WORDS][0],
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_sequence_length": config.max_position,
        "block_position_encoding": True,
        "initializer_range": config.init_std,
        "output_predict": True,
        **{theirs: getattr(config, ours) for ours, theirs in released.SETTINGS.items()},
    }
    write_json(directory / "config.json", config_json)


def _with_padding_rows(weights: Weights, config: ModelConfig, padding_file: Path) -> Weights:
    """The vocabulary padded with the rows of a file, or with zeros to a multiple of 128 if there is no file."""
    assert config.vocab_size is not None
    # An import stores the padding rows of its source, so that an export back is bit-equal.
    if not padding_file.exists():
        return weights.with_rows(WORDS, padded_vocab_size(config.vocab_size))
    padding = open_safetensors(padding_file)
    rows, columns = padding.shapes.get(WORDS, (0, 0))
    if columns != config.hidden_size:
        raise CheckpointError(
            f"{padding_file} has no rows of {config.hidden_size} columns for {WORDS}; remove it to pad with zeros."
        )

    def read(name: str) -> torch.Tensor:
        tensor = weights.read(name)
        return torch.cat([tensor, padding.read(WORDS)]) if name == WORDS else tensor

    return Weights({**weights.shapes, WORDS: (config.vocab_size + rows, columns)}, read)


def glm_config(config: ModelConfig, special: SpecialTokens, dtype: torch.dtype) -> GLMConfig:
    """The transformers configuration of a training configuration."""
    assert config.vocab_size is not None
    class_config = GLMConfig(
        **{name: getattr(config, name) for name in OwnLayout.__annotations__ if name != "gelu"},
        initializer_range=config.init_std,
        gelu=config.activation.removeprefix("gelu_"),
        cls_token_id=special.cls,
        sop_token_id=special.sop,
        eop_token_id=special.eop,
        eos_token_id=special.eos,
        pad_token_id=special.pad,
        mask_token_ids=sorted({special.mask, special.smask, special.gmask}),
        architectures=["GLMForBlankInfilling"],
        dtype=dtype,
    )
    class_config.auto_map = dict(_AUTO_MAP)
    class_config.custom_pipelines = _PIPELINES
    return class_config


def generation_config(special: SpecialTokens) -> GenerationConfig:
    """Settings of generation, as in scripts/generate.py: greedy, spans end at eop or eos, no other special tokens."""
    ends = {special.eop, special.eos}
    return GenerationConfig(
        eos_token_id=sorted(ends),
        pad_token_id=special.pad,
        suppress_tokens=sorted(set(asdict(special).values()) - ends),
        max_new_tokens=64,
    )


def _exported_model(run: OpenRun, dtype: torch.dtype) -> GLM:
    """Our model with the weights as the export has them: rounded to its type, updates of LoRA before that."""
    checkpoint, config = run.checkpoint, run.config.model
    if config.lora is None or dtype == torch.float32:
        return load_model(checkpoint, config, lambda weight: weight.to(dtype).float())
    with torch.device("meta"):
        adapted, model = GLM(config), GLM(replace(config, lora=None))
    read = merged_here(Weights(checkpoint.shapes, weight_reader(checkpoint)), adapted)
    return filled(model, parameter_shapes(model.config), lambda name: read(name).to(dtype).float())


def _prove_published(directory: Path, run: OpenRun, options: ExportOptions, class_name: str) -> Report:
    dtype, config, template = DTYPES[options.dtype], run.config.model, trained_template(run)
    start = None if template is None else next(iter(template.start), None)
    tokenizers = {"tokenizer": prove_exported(run.tokenizer, directory).as_record()}
    comparisons = proof.prove(
        lambda computed: published_proof.ask(directory, class_name, config, start, computed),
        lambda: _exported_model(run, dtype),
        options.tolerance,
        f"the export of {run.checkpoint.path}",
        run.checkpoint.shapes,
    )
    return Report(comparisons, options.tolerance, tokenizers)


def _prove_export(directory: Path, run: OpenRun, options: ExportOptions) -> Report:
    """A model that is rounded to half precision is compared with the rounded training model."""
    dtype, config, tokenizers = DTYPES[options.dtype], run.config.model, {}
    if options.layout == "huggingface":
        tokenizers["tokenizer"] = prove_tokenizer(run.tokenizer, directory).as_record()
    writer = run.tokenizer if "blank_infilling" in objective_names(run.objectives) else None

    def ask(computed: torch.dtype) -> list[Question]:
        if options.layout == "huggingface":
            return glm_proof.ask(directory, config, writer, is_export=True, dtype=computed)
        return glm_proof.ask_released([open_directory(directory)], config, computed)

    comparisons = proof.prove(
        ask,
        lambda: _exported_model(run, dtype),
        options.tolerance,
        f"the export of {run.checkpoint.path}",
        run.checkpoint.shapes,
    )
    return Report(comparisons, options.tolerance, tokenizers)
