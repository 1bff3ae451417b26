"""GLM's own class: tensors under the prefix `glm.`, and the code of the class, which transformers runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from data_utils.tasks.readers.by_name import task_labels
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.config_json import (
    CONFIG_JSON,
    OwnLayout,
    by_transformers,
    check_sizes,
    own_layout,
    read_config_json,
    write_config,
)
from megatron_lite.hf.common.lora import exported_name, merged_model, without_updates
from megatron_lite.hf.common.model_card import model_card
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.recipe import read_recipe, write_recipe
from megatron_lite.hf.common.verify import Checks
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison
from megatron_lite.hf.common.weights import (
    DTYPES,
    SAME_MODEL,
    SCORE,
    TASK_CLASSIFIER,
    TRAINING_JSON,
    TRAINING_TOKENIZER,
    WORDS,
    Weights,
    open_directory,
    write_sharded,
)
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.import_config import import_config, warn_of_ignored
from megatron_lite.hf.glm.tokenizer_files import compare_glm_tokenizer, write_tokenizer
from megatron_lite.hf.glm.verify import glm_checks
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
GLM_VALUES: dict[str, Any] = {
    "rms_norm": False, "ffn": "plain", "ffn_size": None, "biases": "all", "attention_window": 0, "global_every": 1,
    "rotary_base_local": None,
}  # fmt: skip


class GLMFormat(HuggingFaceFormat):
    """One Transformer as GLM's own class."""

    def is_format_of(self, directory: Path) -> bool:
        read_config_json(directory)
        # Names of tensors decide, not config.json: GLM-4 has the model_type "glm" too.
        return any(name.endswith(WORDS) for name in open_directory(directory).shapes)

    def require_model(self, run: OpenRun) -> None:
        """Raise CheckpointError for a model or a vocabulary that GLM's class cannot hold."""
        path, model = run.checkpoint.path, replace(run.config.model, lora=None)
        # An option that is still not plain after this is one that the class does not have.
        other = replace(model, **GLM_VALUES)
        if not other.is_plain or model.biases not in ("all", "none"):
            raise CheckpointError(
                f"checkpoint {path} is of a model with options that GLM's Hugging Face classes do not have; only "
                f"models of GLM's own layers, or with model.system {', '.join(SYSTEMS_BY_NAME)}, can be exported."
            )
        if lacking := sorted({"cls", "mask", "sop", "eop", "eos"} & run.tokenizer.lacking):
            raise CheckpointError(
                f"the vocabulary of checkpoint {path} lacks {', '.join(lacking)}, with which GLM's classes fill "
                "blanks; only runs with tokenizer.added_tokens=glm can be exported."
            )

    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> Checks:
        weights = merged_model(weights, run.config.model)
        run = replace(run, config=without_updates(run.config))
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
        writer = tokenizer if "blank_infilling" in objective_names(run.objectives) else None
        return partial(glm_checks, directory, config.model, tokenizer=writer, is_export=True)

    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        config_json, weights = read_config_json(source), open_directory(source)
        warn_of_ignored(source, weights)
        prefix = next(name for name in weights.shapes if name.endswith(WORDS)).removesuffix(WORDS)
        # lm_head.weight is a copy of the word embedding, which some versions of transformers write.
        names = {_our_name(name, prefix): name for name in weights.shapes if name != "lm_head.weight"}
        weights, settings = weights.renamed(names), own_layout(source, config_json)
        check_sizes(source, settings, weights)
        # The tokenizer decides the size of the vocabulary.
        rows, size = next(iter(weights.shapes[WORDS]), 0), settings.pop("vocab_size")
        if rows != size:
            raise CheckpointError(
                f"{source / CONFIG_JSON}: vocab_size is {size}, but the tensors have {rows}; {SAME_MODEL}."
            )
        base = _recorded(source, settings, weights)
        config, tokenizer, weights = import_config(source, weights, settings, base, tree, directory)
        has_tokenizer = (source / "tokenizer_config.json").exists()
        if verify and has_tokenizer:
            with by_transformers(source):
                compare_glm_tokenizer(tokenizer, source)
        # Blanks are compared only where the model was trained to fill them, and with the tokenizer of the files.
        is_filler = any(choice.name == "blank_infilling" for choice in config.objective_choices)
        writer = tokenizer if is_filler and has_tokenizer else None
        checks = partial(glm_checks, source, config.model, tokenizer=writer, is_export=False)
        return Imported(config, weights, checks)

    def compare_tokenizers(self, run: OpenRun, directory: Path) -> dict[str, TokenizerComparison]:
        return {"tokenizer": compare_glm_tokenizer(run.tokenizer, directory)}


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


def _our_name(name: str, prefix: str) -> str:
    """The name of our parameter for a tensor of the class. Args: prefix: of the stack, `glm.` or none."""
    return TASK_CLASSIFIER + name.removeprefix(SCORE) if name.startswith(SCORE) else name.removeprefix(prefix)


def _recorded(path: Path, settings: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """The configuration of training.json, with the tokenizer if its files are there."""
    recorded = read_recipe(path)
    model = recorded.config.get("model", {})
    # The two files are fetched together; one that is newer than the other describes another model.
    different = [
        f"model.{name} is {shown(value)} in {CONFIG_JSON} and {shown(model[name])} in {TRAINING_JSON}"
        for name, value in settings.items()
        if model.get(name, value) != value
    ]
    if different:
        raise CheckpointError(f"{path}: {'; '.join(different)}; fetch both again.")
    check_sizes(path, model, weights)
    if (path / TRAINING_TOKENIZER).is_dir() and "tokenizer" in recorded.tokenizers:
        return {**recorded.config, "tokenizer": recorded.tokenizers["tokenizer"]}
    return recorded.config
