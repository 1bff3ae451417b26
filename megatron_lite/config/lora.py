"""The section `model.lora`: low-rank updates of the linear layers of blocks, and the names by which they are chosen.

A target is a name of ours, such as attention.query_key_value, or of the system's class of transformers, such as q_proj,
and means every linear layer of a block whose name is it or ends with it, as for peft's `target_modules`. Where the
class has separate modules for what is one weight here (q_proj, k_proj and v_proj), each has an update of its own, so
that peft's files map tensor by tensor.

`_LAYERS` repeats the names of the tables in megatron_lite/hf/published, which import torch; a test compares the two.

Source: LoRA, arXiv:2106.09685; rank-stabilized: arXiv:2312.03732; names: peft 0.21.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_utils.common.setting_files import shown
from data_utils.common.settings import REQUIRED, check, checked, setting

if TYPE_CHECKING:  # they import this module
    from megatron_lite.config.model import ModelConfig
    from megatron_lite.config.tree import Config

LORA = ".lora."  # in the names of the parameters of updates, and of no others
WHOLE = "whole"  # the update of a layer that the class has as one module too
# Our layers that classes have as several modules, and what each computes.
PARTS = {
    "attention.query_key_value": ("query", "key", "value"),
    "attention.position_query_key": ("position_query", "position_key"),
    "cross_attention.key_value": ("key", "value"),
    "mlp.dense_h_to_4h": ("gate", "up"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model.lora")
class LoraConfig:
    rank: int = setting(REQUIRED, "Rank r of the update W + scale B A (peft: r).", at_least=1)
    alpha: float = setting(16.0, "The scale is alpha / rank (peft: lora_alpha).", above=0)
    dropout: float = setting(
        0.0, "Dropout probability on the input of A (peft: lora_dropout).", at_least=0, below=1
    )
    targets: tuple[str, ...] = setting(
        (),
        "Linear layers of the blocks that have an update, by the names here (attention.query_key_value, mlp.gate) or "
        "by the names in the class of transformers (q_proj) (peft: target_modules); [] = all.",
    )
    rank_stabilized: bool = setting(
        False, "The scale is alpha / sqrt(rank) instead (rsLoRA; peft: use_rslora)."
    )

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


Layers = Mapping[str, tuple[str, ...]]  # our linear layer of a block -> the modules of the class that are it


def _layers(qkv: str, dense: str, expand: str, contract: str) -> Layers:
    """Args: each has the names of the modules, separated by spaces."""
    names = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    return {
        ours: tuple(theirs.split())
        for ours, theirs in zip(names, (qkv, dense, expand, contract), strict=True)
        if theirs
    }


_GLM: Layers = {
    name: (name,)
    for name in (
        "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
        "cross_attention.query", "cross_attention.key_value", "cross_attention.dense", "attention.position_query_key",
    )
}  # fmt: skip
_BERT = _layers(
    "attention.self.query attention.self.key attention.self.value",
    "attention.output.dense", "intermediate.dense", "output.dense",
)  # fmt: skip
_DEBERTA = {
    **_BERT,
    "attention.query_key_value": tuple(f"attention.self.{x}_proj" for x in ("query", "key", "value")),
    "attention.position_query_key": ("attention.self.pos_query_proj", "attention.self.pos_key_proj"),
}
_LLAMA_ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_LLAMA = _layers(
    _LLAMA_ATTENTION, "self_attn.o_proj", "mlp.gate_proj mlp.up_proj", "mlp.down_proj"
)  # fmt: skip
_GPT = _layers("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_BART = {
    **_layers(_LLAMA_ATTENTION, "self_attn.out_proj", "fc1", "fc2"),
    "cross_attention.query": ("encoder_attn.q_proj",),
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.dense": ("encoder_attn.out_proj",),
}
_T5 = {
    **_layers(
        "SelfAttention.q SelfAttention.k SelfAttention.v", "SelfAttention.o", "DenseReluDense.wi", "DenseReluDense.wo"
    ),
    "cross_attention.query": ("EncDecAttention.q",),
    "cross_attention.key_value": ("EncDecAttention.k", "EncDecAttention.v"),
    "cross_attention.dense": ("EncDecAttention.o",),
}  # fmt: skip
_T5_GATED = {**_T5, "mlp.dense_h_to_4h": ("DenseReluDense.wi_0", "DenseReluDense.wi_1")}
_LAYERS: dict[str, Layers] = {
    **dict.fromkeys(
        (
            "bert", "roberta", "xlm_roberta", "camembert", "spanbert", "electra", "electra_generator", "ernie",
            "ernie2", "unilm",
        ),
        _BERT,
    ),
    "deberta_v3": _DEBERTA,
    "albert": _layers("attention.query attention.key attention.value", "attention.dense", "ffn", "ffn_output"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "eurobert"), _LLAMA),
    **dict.fromkeys(
        ("glm4", "glm4_0414"),
        _layers(_LLAMA_ATTENTION, "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    ),
    **dict.fromkeys(("gpt", "gpt2"), _GPT),
    **dict.fromkeys(("bart", "mass"), _BART),
    **dict.fromkeys(("t5", "t5_1_1", "mt5"), _T5),
    "modernbert": _layers("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    "modernbert_decoder": _layers("attn.q_proj attn.k_proj attn.v_proj", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    "neobert": _layers("qkv", "wo", "ffn.w12", "ffn.w3"),
    # The class computes with tensors where attention has linear layers here: peft finds no module there.
    "xlnet": _layers("", "", "ff.layer_1", "ff.layer_2"),
}  # fmt: skip
# Systems whose classes have linear layers of this name outside the blocks too, in heads.
_DENSE_IN_HEADS = {name for name, layers in _LAYERS.items() if layers in (_BERT, _DEBERTA)} | {"albert"}


def class_layers(model: ModelConfig) -> Layers:
    """Our linear layers in the blocks of a model that may have updates -> the modules of its class."""
    layers = _LAYERS.get(model.system or "", _GLM)
    if layers is _T5 and model.ffn == "gated":
        layers = _T5_GATED
    return {
        ours: theirs
        for ours, theirs in layers.items()
        if (model.decoder_layers or not ours.startswith("cross_attention."))
        and (model.position_projections or ours != "attention.position_query_key")
    }


def _names(ours: str, theirs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Part of one of our layers -> the names of it that a target may have."""
    if len(theirs) == 1:
        return {WHOLE: (ours, *theirs)}
    above = ours.rpartition(".")[0]
    return {part: (ours, f"{above}.{part}", name) for part, name in zip(PARTS[ours], theirs, strict=True)}


@functools.lru_cache(maxsize=64)
def updated_parts(model: ModelConfig) -> Mapping[str, tuple[str, ...]]:
    """Our linear layer of a block -> its parts that have an update, as `model.lora` chooses them; {} without it.

    Raises: ConfigError for a target that names none.
    """
    lora = model.lora
    if lora is None:
        return {}
    parts = {ours: _names(ours, theirs) for ours, theirs in class_layers(model).items()}
    every = [names for of_layer in parts.values() for names in of_layer.values()]
    known = list(dict.fromkeys(name for names in every for name in names))
    unknown = [target for target in lora.targets if not any(_is_named(target, name) for name in known)]
    check(
        not unknown,
        f"model.lora.targets contains {', '.join(map(shown, unknown))}, but updates are of linear layers in blocks, "
        f"not of embeddings, norms or heads; choose from {', '.join(known)}, or from their last words, or set it to [] "
        "for all of them.",
    )
    check(
        "dense" not in lora.targets or model.system not in _DENSE_IN_HEADS,
        f"model.lora.targets contains dense, which in the class of {model.system} is also the name of layers in "
        f"its heads, that have no update here; choose from {', '.join(known)}.",
    )
    return {
        ours: chosen
        for ours, of_layer in parts.items()
        if (
            chosen := tuple(
                part
                for part, names in of_layer.items()
                if not lora.targets or any(_is_named(t, name) for t in lora.targets for name in names)
            )
        )
    }


def _is_named(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def check_lora(model: ModelConfig) -> None:
    """Raise ConfigError for updates that the model cannot have."""
    updated_parts(model)
    check(
        model.lora is None or model.mup is None,
        "model.lora is set with model.mup, whose rules do not cover it; remove one of them.",
    )
    check(
        model.lora is None or not model.adapter_size,
        f"model.lora is set with model.adapter_size ({model.adapter_size}), other adapters; remove one of them.",
    )


def check_updates(config: Config) -> None:
    """Raise ConfigError for a run that cannot train low-rank updates alone."""
    lora, finetune = config.model.lora, config.finetune
    check(
        config.decoder is None or config.decoder.lora is None,
        "decoder.lora is set, but LoRA trains one Transformer; set it to null.",
    )
    if lora is None:
        check(
            config.task is None or finetune.trained != "lora",
            "finetune.trained is lora, but model.lora is null; set model.lora.rank to a rank such as 8.",
        )
        return
    of_models = [choice.name for choice in config.objective_choices if choice.section.own_model_advice]
    for name, value, is_allowed, why, remedy in (
        (
            "objectives", ", ".join(of_models), not of_models, "trains more than one Transformer",
            "set model.lora to null",
        ),
        (
            "optimizer.kind", config.optimizer.kind, config.optimizer.kind == "adamw",
            "has no rule for LoRA's factors, one of which begins at zero", "set it to adamw",
        ),
        (
            "ema.decay", config.ema.decay, config.ema.decay is None, "would average frozen weights",
            "set it to null",
        ),
        (
            "finetune.trained", finetune.trained, config.task is None or finetune.trained == "lora",
            "trains other weights", "set it to lora, or model.lora to null",
        ),
        (
            "finetune.unfreeze", finetune.unfreeze, finetune.unfreeze == "all", "trains other weights later",
            "set it to all",
        ),
    ):  # fmt: skip
        check(is_allowed, f"{name} is {value} with model.lora, but it {why}; {remedy}.")
    layers = updated_parts(config.model)
    check(
        config.parallel.pipeline_parallel_size == 1
        or any(not path.startswith("cross_attention.") for path in layers),
        f"model.lora.targets is {list(lora.targets)} with parallel.pipeline_parallel_size "
        f"{config.parallel.pipeline_parallel_size}, but stages of encoder blocks would have nothing to train; add a "
        "target in self-attention or in the FFN.",
    )
