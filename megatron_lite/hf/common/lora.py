"""Updates of LoRA under the names of a class of transformers, and the weights of the class with updates merged.

A module of the class has the update of our layer, or of one part of it (config/lora.py), in the same order of output
features as its weight: B follows the weight's transform, A never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from megatron_lite.config.lora import LORA, PARTS, WHOLE, LoraConfig, class_layers
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.system_table import SAME, TRANSPOSED, WeightTransform
from megatron_lite.hf.common.weights import SCORE, TASK_CLASSIFIER, Weights
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.tensor_parallel import partition_of
from megatron_lite.transformer.transformer import Transformer

GLM_PREFIX = "glm."  # of the names in GLM's own class


@dataclass(frozen=True)
class ClassModule:
    """A linear module of a class: the update of ours that it has, and the transform of its weight."""

    ours: str  # such as layers.0.attention.query_key_value.lora.query
    config: ModelConfig
    transform: WeightTransform = SAME

    @property
    def is_transposed(self) -> bool:
        """Whether its weight is [in, out] (GPT-2's Conv1D); the factors of peft are not."""
        return self.transform == TRANSPOSED

    def b_to_theirs(self, b: torch.Tensor) -> torch.Tensor:
        return b if self.is_transposed else self.transform.to_theirs(b, self.config).contiguous()

    def b_to_ours(self, b: torch.Tensor) -> torch.Tensor:
        return b if self.is_transposed else self.transform.to_ours(b, self.config).contiguous()


Modules = Mapping[str, ClassModule]  # by the name of the class's module


def exported_name(name: str) -> str:
    """The name of a parameter in GLM's own class."""
    if name.startswith(TASK_CLASSIFIER):
        return SCORE + name.removeprefix(TASK_CLASSIFIER)
    return GLM_PREFIX + name


def own_modules(config: ModelConfig, rename: Callable[[str], str]) -> Modules:
    """The modules of GLM's own class that may have an update. Args: rename: our name of a parameter -> the class's."""
    layers = class_layers(config)
    modules = {}
    for name in parameter_shapes(replace(config, lora=None)):
        module = name.removesuffix(".weight")
        if name.startswith("layers.") and name.endswith(".weight") and module.split(".", 2)[2] in layers:
            modules[rename(name).removesuffix(".weight")] = ClassModule(f"{module}{LORA}{WHOLE}", config)
    return modules


def split_updates(weights: Weights) -> tuple[Weights, Weights]:
    """The model without its updates, and the updates."""
    names = [[name for name in weights.shapes if (LORA in name) == is_update] for is_update in (False, True)]
    base, updates = (weights.renamed({name: name for name in some}) for some in names)
    return base, updates


def without_updates(config: Config) -> Config:
    """The configuration of the merged model: nothing of it was chosen for the updates alone."""
    if config.model.lora is None:
        return config
    finetune = replace(config.finetune, trained="all") if config.task is not None else config.finetune
    return replace(config, model=replace(config.model, lora=None), finetune=finetune)


def merged_here(weights: Weights, model: Transformer) -> Callable[[str], torch.Tensor]:
    """A function: name -> weight with its updates added, under our names. Args: model: with updates, of any device."""
    config, parameters = model.config, dict(model.named_parameters())
    settings, layers = config.lora, class_layers(config)
    assert settings is not None

    def read(name: str) -> torch.Tensor:
        weight, module = weights.read(name), name.removesuffix(".weight")
        path = module.split(".", 2)[-1]
        if not name.startswith("layers.") or not name.endswith(".weight") or path not in layers:
            return weight
        is_whole = len(layers[path]) == 1
        rows = [len(weight)] if is_whole else partition_of(parameters[name]).block_rows(len(weight))
        blocks = list(weight.split(rows))
        for number, part in enumerate((WHOLE,) if is_whole else PARTS[path]):
            key = f"{module}{LORA}{part}"
            if f"{key}.a" in weights.shapes:
                product = weights.read(f"{key}.b") @ weights.read(f"{key}.a")
                blocks[number] = blocks[number] + product * settings.scale
        return torch.cat(blocks)

    return read


def merged_model(weights: Weights, config: ModelConfig) -> Weights:
    """The weights of a model with its updates added, under our names. Args: config: with `lora`, if it has updates."""
    if config.lora is None:
        return weights
    base, updates = split_updates(weights)
    return merged(base, updates, own_modules(config, lambda name: name), config.lora)


def merged(theirs: Weights, updates: Weights, modules: Modules, settings: LoraConfig) -> Weights:
    """The tensors of a class with the updates added, bit for bit as peft's merge_and_unload adds them."""

    def read(name: str) -> torch.Tensor:
        weight, module = theirs.read(name), modules.get(name.removesuffix(".weight"))
        if module is None or not name.endswith(".weight") or f"{module.ours}.a" not in updates.shapes:
            return weight
        # In the class's order of features: a product of reordered rows may round otherwise.
        product = module.b_to_theirs(updates.read(f"{module.ours}.b")) @ updates.read(f"{module.ours}.a")
        return weight + (product.T if module.is_transposed else product) * settings.scale

    return replace(theirs, read=read)
