"""Writes one Transformer as the directory of its class of transformers: config.json, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from data_utils.common.errors import CheckpointError
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import task_labels
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.lora import LoraConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.config_json import write_config
from megatron_lite.hf.common.lora import merged
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.common.weights import (
    DTYPES,
    METADATA,
    Weights,
    open_safetensors,
    read_json,
    write_sharded,
)
from megatron_lite.hf.published.heads import OTHER_HEADS, SEVERAL_LABELS, transformers_class_name
from megatron_lite.hf.published.ids import generation_ids, special_ids, write_generation_config
from megatron_lite.hf.published.recognition import body_class, is_body
from megatron_lite.hf.published.source import is_headless
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.tensor_map import (
    SKIPPED_ROWS,
    TensorMapping,
    class_modules,
    tensor_mappings,
    to_theirs,
    with_tied_copies,
)
from megatron_lite.hf.published.tokenizers import write_tokenizer
from megatron_lite.hf.published.write_config import former_fields, hf_config
from megatron_lite.inference.states import PromptTemplate

# Parameters that no class of transformers has: of SpanBERT's head, of class_heads, and of DeBERTa's discriminator.
_NOT_IN_CLASSES = ("heads.span_boundary.", "heads.boundary_bias", "heads.sentence.classifiers.", "replaced.")


@dataclass(frozen=True)
class Stack:
    """A Transformer to write as a directory of its class."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    imported: Path  # directory of the files of its import, if it was imported
    name: str  # in messages
    roles: Mapping[str, str] | None = None  # field of config.json for a token -> its role; None: the system's
    task: TaskConfig | None = None  # of its head
    template: PromptTemplate | None = None  # in which it was trained here to generate, if it was
    lora: LoraConfig | None = None  # of the updates that are merged into the weights
    updates: Weights | None = None


@dataclass(frozen=True)
class ClassLayout:
    """The class of transformers of a stack, and how its tensors map to ours."""

    class_name: str
    class_config: PretrainedConfig
    system: PublishedSystem
    mappings: Mapping[str, TensorMapping]  # by the names in a class with a head
    ids: Mapping[str, int | None]  # field of config.json for a special token -> its id

    def name(self, full: str) -> str:
        """The name in the class of a body, which lacks the prefix that a class with a head has."""
        return full.removeprefix(self.system.prefix) if is_body(self.class_name) else full


def class_layout(stack: Stack, dtype: str) -> ClassLayout:
    """Raises: CheckpointError for a stack that no class has."""
    config, weights, imported = stack.config, stack.weights, stack.imported
    system = published_system(config)
    ids = special_ids(stack.tokenizer, system, stack.roles, stack.name)
    # An export of an import begins with the fields of its source, so that what is not trained here stays as it was.
    base: dict[str, Any] = read_json(imported / "config.json") if imported.exists() else {**ids}
    base |= generation_ids(system, stack.template)
    if stack.task is not None and stack.task.kind == "typing":
        base["problem_type"] = SEVERAL_LABELS
    labels = () if stack.task is None else task_labels(stack.task)
    class_config = hf_config(config, {**base, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}, labels)
    system = system.padded_with(class_config.pad_token_id)
    if system.legacy is not None and class_config.legacy:
        system = system.legacy
    mappings = tensor_mappings(system, weights.shapes, config)
    class_name = transformers_class_name(system, config)
    if is_headless(config) and not any(name.startswith("replaced.") for name in weights.shapes):
        class_name = body_class(system)  # of a discriminator without its generator
        class_config.architectures = [class_name]
        mappings = {name: each for name, each in mappings.items() if not each.ours.startswith("heads.")}
    return ClassLayout(class_name, class_config, system, mappings, ids)


def write_stack(directory: Path, stack: Stack, dtype: str, max_shard_bytes: int) -> tuple[str, str | None]:
    """Write config.json, weights and tokenizer files. Raises: CheckpointError.

    Returns: the name of the class, and the file of the heads that it does not have, if the stack has such heads.
    """
    config, weights, imported = stack.config, stack.weights, stack.imported
    layout = class_layout(stack, dtype)
    extra = _heads_of_no_class(stack, layout)
    write_sharded(directory, _class_tensors(stack, layout), DTYPES[dtype], max_shard_bytes)
    if extra:
        write_tensors(directory / OTHER_HEADS, extra, map(weights.read, extra), DTYPES[dtype], METADATA)
    write_config(directory, layout.class_config, former_fields(config))
    ids = {name: i for name, i in layout.ids.items() if i is not None}
    has_segments = config.segments > 1 or config.relative == "xlnet"
    write_tokenizer(directory, stack.tokenizer, ids, imported, config.system, has_segments=has_segments)
    write_generation_config(
        directory, layout.class_config, layout.system, stack.template, is_imported=imported.exists()
    )
    return layout.class_name, OTHER_HEADS if extra else None


def _heads_of_no_class(stack: Stack, layout: ClassLayout) -> dict[str, tuple[int, ...]]:
    """Name -> shape of our parameters that the class does not have. Raises: CheckpointError for any but heads."""
    config, weights = stack.config, stack.weights
    has_head = config.task_head.type == "none" and not is_headless(config)
    extra_prefixes = _NOT_IN_CLASSES if has_head else ("heads.", *_NOT_IN_CLASSES)
    mapped = {each.ours for each in layout.mappings.values()}
    extra = {
        ours: shape
        for ours, shape in weights.shapes.items()
        if ours.startswith(extra_prefixes) and ours not in mapped
    }
    # A parameter that no tensor holds would be lost without a message.
    if left := weights.shapes.keys() - mapped - extra.keys():
        raise CheckpointError(
            f"{stack.name} has {', '.join(sorted(left)[:3])}, which the class {layout.class_name} has not; "
            "only models of the published architecture can be exported."
        )
    return extra


def _class_tensors(stack: Stack, layout: ClassLayout) -> Weights:
    """The tensors of the class, with updates of LoRA merged."""
    path = stack.imported / SKIPPED_ROWS
    first_rows = open_safetensors(path) if path.exists() else None
    theirs = to_theirs(stack.weights, layout.mappings, first_rows, layout.system)
    if stack.lora is not None and stack.updates is not None:
        theirs = merged(theirs, stack.updates, class_modules(layout.mappings, stack.config), stack.lora)
    theirs = theirs.renamed({layout.name(name): name for name in theirs.shapes})
    return with_tied_copies(theirs, layout.system, stack.config)
