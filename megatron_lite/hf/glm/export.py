"""Writes a run as a directory of GLM's own class, or in the layout of the released GLM checkpoints, and proves it.

    write_glm, prove_glm             tensors under the prefix `glm.`, and the code of the class, which transformers runs
    write_released, prove_released   tensors and config.json as in the released checkpoints, without a tokenizer

Rows that pad the vocabulary are not trained. An import from the released layout keeps them in a file of the run's
directory, and write_released reads them there; without that file they are zero.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from data_utils.common.errors import CheckpointError
from data_utils.tasks.readers.by_name import task_labels
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.hf.files import proof
from megatron_lite.hf.files.config_json import OwnLayout, write_config
from megatron_lite.hf.files.lora import exported_name
from megatron_lite.hf.files.model_card import model_card
from megatron_lite.hf.files.proof_report import Report
from megatron_lite.hf.files.recipe import write_recipe
from megatron_lite.hf.files.weights import (
    DTYPES,
    PADDING_ROWS,
    WORDS,
    Weights,
    open_directory,
    open_safetensors,
    write_json,
    write_sharded,
)
from megatron_lite.hf.glm import proof as glm_proof
from megatron_lite.hf.glm import released
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.tokenizer_files import prove_tokenizer, write_tokenizer
from megatron_lite.hf.published.heads import SEVERAL_LABELS
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.inference.open_run import OpenRun, objective_names

# The files of the class, copied into an export: transformers has no class of GLM and runs them.
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
# Options that GLM's class has and GLM does not use, with the values that GLM has for them.
_GLM_VALUES: dict[str, Any] = {
    "rms_norm": False, "ffn": "plain", "ffn_size": None, "biases": "all", "attention_window": 0, "global_every": 1,
    "rotary_base_local": None,
}  # fmt: skip


def require_glm(run: OpenRun) -> None:
    """Raise CheckpointError for a model or a vocabulary that GLM's class cannot hold."""
    path, model = run.checkpoint.path, run.config.model
    # An option that is still not plain after this is one that the class does not have.
    other = replace(model, **_GLM_VALUES)
    if not other.is_plain or model.biases not in ("all", "none"):
        raise CheckpointError(
            f"checkpoint {path} is of a model with options that GLM's Hugging Face classes do not have; only models of "
            f"GLM's own layers, or with model.system {', '.join(SYSTEMS_BY_NAME)}, can be exported."
        )
    if lacking := sorted({"cls", "mask", "sop", "eop", "eos"} & run.tokenizer.lacking):
        raise CheckpointError(
            f"the vocabulary of checkpoint {path} lacks {', '.join(lacking)}, with which GLM's classes fill blanks; "
            "only runs with tokenizer.added_tokens=glm can be exported."
        )


def require_released(run: OpenRun) -> None:
    """Raise CheckpointError for a model that is not exactly GLM, or that was not trained to fill blanks."""
    require_glm(run)
    path, names, model = run.checkpoint.path, objective_names(run.objectives), run.config.model
    for name, is_used in (
        ("the head of a task", model.task_head.type != "none"),
        ("rotary positions", model.positions == "rotary"),
        ("local layers, another norm or FFN, or no biases", replace(model, **_GLM_VALUES) != model),
    ):
        if is_used:
            raise CheckpointError(
                f"checkpoint {path} has {name}, which the released layout does not have; use --layout huggingface."
            )
    # config.json of the released layout does not name objectives: its users fill blanks.
    if "blank_infilling" not in names:
        raise CheckpointError(
            f"checkpoint {path} was trained on {', '.join(names)}, but the released layout is for models that fill "
            "blanks; use --layout huggingface."
        )


def write_glm(directory: Path, weights: Weights, run: OpenRun, dtype: str, max_shard_bytes: int) -> None:
    """Write weights, config.json, the class's code, the tokenizer, the recipe and the card.

    Args: dtype: a key of DTYPES, of the written weights.
    """
    config, tokenizer = run.config, run.tokenizer
    exported = weights.renamed({exported_name(name): name for name in weights.shapes})
    write_sharded(directory, exported, DTYPES[dtype], max_shard_bytes)
    class_config = glm_config(config.model, tokenizer.special, DTYPES[dtype])
    class_config.trained_objectives = objective_names(run.objectives)
    # In config.json too: `pipeline` of versions before 4.57 loads no tokenizer for a model that it does not know.
    class_config.tokenizer_class = write_tokenizer(tokenizer, directory, config.model.max_position + 1)
    if config.model.task_head.type != "none":
        _describe_head(class_config, run)
    write_config(directory, class_config, {})
    generation_config(tokenizer.special).save_pretrained(directory)
    for name in _CODE:
        shutil.copyfile(Path(__file__).with_name(name), directory / name)
    write_recipe(directory, run)
    (directory / "README.md").write_text(model_card(run), encoding="utf-8")


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


def _describe_head(class_config: GLMConfig, run: OpenRun) -> None:
    """Set the class of a task's head and the names of its labels."""
    task = run.config.task
    class_config.architectures = ["GLMForSequenceClassification"]
    if run.config.model.task_head.type == "values":
        class_config.num_labels = 1
        return
    names = () if task is None else task_labels(task)
    class_config.problem_type = SEVERAL_LABELS if task is not None and task.kind == "typing" else None
    class_config.id2label = dict(enumerate(names or map(str, range(run.config.model.task_head.classes))))
    class_config.label2id = {name: number for number, name in class_config.id2label.items()}


def write_released(directory: Path, weights: Weights, run: OpenRun, dtype: str, max_shard_bytes: int) -> None:
    """Write weights and config.json as in the released checkpoints. Args: dtype: a key of DTYPES."""
    config, run_directory = run.config.model, run.checkpoint.path.parent.parent
    padded = _with_padding_rows(weights, config, run_directory / PADDING_ROWS)
    write_sharded(directory, released.in_released_layout(padded), DTYPES[dtype], max_shard_bytes)
    config_json = {
        "model_type": "glm",
        "vocab_size": padded.shapes[WORDS][0],
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


def prove_glm(run: OpenRun, directory: Path, dtype: str, tolerance: float) -> Report:
    """Compare a run with what write_glm wrote. Raises: CheckpointError unless both compute the same.

    Args: dtype: of the written weights; the run's weights are rounded to it.
    """
    tokenizers = {"tokenizer": prove_tokenizer(run.tokenizer, directory).as_record()}
    writer = run.tokenizer if "blank_infilling" in objective_names(run.objectives) else None

    def ask(computed: torch.dtype) -> list[proof.Question]:
        return glm_proof.ask(directory, run.config.model, writer, is_export=True, dtype=computed)

    return Report(proof.prove_export(ask, run, dtype, tolerance), tolerance, tokenizers)


def prove_released(run: OpenRun, directory: Path, dtype: str, tolerance: float) -> Report:
    """As prove_glm, of write_released, by the reference's arithmetic. There is no tokenizer to compare."""

    def ask(computed: torch.dtype) -> list[proof.Question]:
        return glm_proof.ask_released([open_directory(directory)], run.config.model, computed)

    return Report(proof.prove_export(ask, run, dtype, tolerance), tolerance, {})
