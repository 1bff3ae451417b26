"""Parameters and FLOPs of a model, in all and by layer, counted from the shapes of its parameters.

The parameters are those of the real modules on the device "meta", where they need no memory. So an option of the model
is counted as soon as it exists, and no formula can contradict the modules. Importing torch takes seconds, so the checks
of a configuration use no counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_lite.config.lora import LORA
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.tensor_parallel import partition_of, whole_shape
from megatron_lite.transformer.transformer import Transformer

WORDS = "embedding.word_embeddings.weight"
EXPERTS = ".mlp.experts."  # in the names of parameters of routed experts
_NO_PRODUCTS = (
    "_embeddings.weight",
    "position_query_key.weight",
)  # of tokens: tables, and the product of positions
POSITIONS_COST = 0.05  # of the look-ups and sums of the embeddings, in blocks
Shapes = Mapping[str, tuple[int, ...]]


@functools.lru_cache(maxsize=16)
def shapes_of(made: Callable[..., torch.nn.Module], *args: Any) -> tuple[Shapes, Shapes]:
    """Name -> shape of every parameter with the rows that pad the vocabulary, and without. Args: made: of args."""
    # The real modules without memory: no formula to keep in step with each new option.
    with torch.device("meta"):
        named = dict(made(*args).named_parameters())
    padded = {name: tuple(p.shape) for name, p in named.items()}
    return padded, {name: whole_shape(padded[name], partition_of(p), 1) for name, p in named.items()}


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the training model, without padding rows, as checkpoints hold them."""
    return dict(shapes_of(Transformer, model)[1])


def update_shapes(model: ModelConfig, prefix: str) -> list[tuple[int, int]]:
    """Shapes of the factors of LoRA's updates whose names begin with `prefix`."""
    if model.lora is None:
        return []
    named = shapes_of(Transformer, model)[1].items()
    return [(shape[0], shape[1]) for name, shape in named if name.startswith(prefix) and LORA in name]


def trained_count(model: ModelConfig) -> int:
    """Parameters that are trained, with the rows that pad the vocabulary; with LoRA a task's head too."""
    shapes, head = shapes_of(Transformer, model)[0].items(), "heads.task."
    return sum(
        math.prod(shape)
        for name, shape in shapes
        if model.lora is None or LORA in name or name.startswith(head)
    )


def parameter_count(model: ModelConfig, padded: bool = True) -> int:
    """Parameters, with or without the rows that pad the vocabulary. Needs model.vocab_size."""
    return sum(map(math.prod, shapes_of(Transformer, model)[0 if padded else 1].values()))


def active_count(model: ModelConfig) -> int:
    """Parameters that compute a token: of the routed experts those that it chooses. Needs model.vocab_size."""
    shapes = shapes_of(Transformer, model)[0].items()
    routed = sum(math.prod(shape) for name, shape in shapes if EXPERTS in name)
    if model.experts is None:
        return parameter_count(model)
    idle = model.experts.count - model.experts.per_token
    return parameter_count(model) - routed // model.experts.count * idle


@functools.lru_cache(maxsize=4096)
def _products(model: ModelConfig, prefix: str) -> int:
    """Multiply-adds per token of the matrices whose names begin with `prefix`. Tables are looked up: no product."""
    products = {
        name: math.prod(shape)
        for name, shape in shapes_of(Transformer, model)[1].items()
        if name.startswith(prefix) and len(shape) == 2 and not name.endswith(_NO_PRODUCTS)
    }
    routed = sum(count for name, count in products.items() if EXPERTS in name)
    if model.experts is None or not routed:
        return sum(products.values())
    return sum(products.values()) - routed + routed // model.experts.count * model.experts.per_token


def _block_products(model: ModelConfig, targets: float) -> list[float]:
    """Multiply-adds per token of the matrices of each layer.

    Args: targets: of a model with a decoder, the part of all tokens that are the decoder's.
    """
    if not model.decoder_layers:
        own = [0] if model.share_layers != "none" else range(model.num_layers)
        products = [float(_products(model, f"layers.{i}.")) for i in own]
        return products * (model.num_layers // len(products))
    encoder, decoder = (float(_products(model, f"layers.{i}.")) for i in (0, model.num_layers))
    # Keys and values of cross-attention are those of the encoder's tokens.
    keys = _products(model, f"layers.{model.num_layers}.cross_attention.key_value.")
    # Shares of all tokens: the decoder's products run on its own tokens, keys and values on the encoder's.
    decoder = (decoder - keys) * targets + keys * (1 - targets)
    return [encoder * (1 - targets)] * model.num_layers + [decoder] * model.decoder_layers


def _further_products(model: ModelConfig) -> int:
    """Multiply-adds per token of the block of further tokens (MTP)."""
    return _products(model, f"layers.{model.num_layers}.") * model.mtp_layers


def _head_products(model: ModelConfig) -> int:
    """Multiply-adds per token with loss. SpanBERT predicts it twice. The class of a sentence costs next to nothing."""
    # An untied matrix is among the heads' products already, once.
    times = (2 if model.span_boundary_places else 1) - (not model.tie_word_embeddings)
    vocabulary = math.prod(shapes_of(Transformer, model)[1][WORDS]) * times
    others = _products(model, "heads.sentence.") + _products(model, "heads.task.")
    return vocabulary + _products(model, "heads.") - others


def step_flops(
    model: ModelConfig,
    tokens: int,
    loss_tokens: int,
    visible_keys: float,
    decoder_tokens: int = 0,
    decoder_keys: int = 0,
) -> float:
    """Model FLOPs of a training step, forward and backward (3x forward; LoRA: less), without recomputation.

    Args:
        tokens: tokens that are not padding.
        loss_tokens: tokens on which the head runs, those of a further block (MTP) among them.
        visible_keys: sum over tokens of the number of keys each may attend to.
        decoder_tokens, decoder_keys: the part of both that a decoder computes, where the model has one.
    """
    per_token = sum(_block_products(model, decoder_tokens / max(tokens, 1))) + _products(model, "embedding.")
    per_token += _further_products(model)
    pairs = (model.num_layers + model.mtp_layers) * visible_keys
    if model.decoder_layers:
        pairs += (model.decoder_layers - model.num_layers) * decoder_keys
    per_pair = 2 * model.attention_size  # scores, and the sum of values
    if (
        model.relative == "disentangled"
    ):  # with the buckets' queries and keys, of which a token needs those of its pairs
        pairs += model.num_layers * min(visible_keys, model.position_rows * tokens)
    forward = per_token * tokens + per_pair * pairs + _head_products(model) * loss_tokens
    # 2 FLOPs for a multiply-add; the backward pass computes two products for each of the forward pass.
    flops = 3.0 * 2.0 * forward
    if model.lora is not None:  # frozen weights have no gradient, which is one of the two
        frozen = replace(model, lora=None)
        of_blocks = sum(_block_products(frozen, decoder_tokens / max(tokens, 1)))
        of_token = of_blocks + _products(frozen, "embedding.")
        flops -= 2.0 * (of_token * tokens + _head_products(frozen) * loss_tokens)
    return flops


def layer_costs(model: ModelConfig, loss_share: float) -> list[float]:
    """FLOPs of words, positions, each block, final norm and output, in units of the first block.

    Attention over keys is left out, and the head runs on tokens with loss only: `loss_share` of all, which are a
    decoder's tokens where there is one. The block of further tokens runs with the final norm.
    """
    first = _products(model, "layers.0.")
    blocks = [block / first for block in _block_products(model, loss_share)]
    positions = POSITIONS_COST + _products(model, "embedding.") / first
    further, heads = _further_products(model) / first, 1 + model.mtp_layers
    return [0.0, positions, *blocks, further, heads * loss_share * _head_products(model) / first]
