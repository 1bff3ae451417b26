"""The layout of the released GLM checkpoints: tensor names, the reference's model-parallel shards, its arithmetic.

Hugging Face directories and `mp_rank_XX_model_states.pt` have the tensor names of the reference's state dictionary. A
shard holds a slice of the vocabulary, of the heads (Q, K and V one after the other within the slice) and of the inner
FFN dimension; LayerNorms, position tables and the biases of row-parallel layers are whole in every shard.

`reference_logits` computes the model from such shards without merging them, as the reference does. It shares no code
with our model, so that its logits can prove an import.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from data_utils.common.errors import CheckpointError
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.weights import Weights, from_state_dict, load_pickle

WORDS = "word_embeddings.weight"
# Our model settings -> their names in a released config.json.
SETTINGS = {
    "num_attention_heads": "num_attention_heads",
    "embedding_dropout": "embedding_dropout_prob",
    "attention_dropout": "attention_dropout_prob",
    "output_dropout": "output_dropout_prob",
}
# How the reference shards a tensor: dimension, and number of blocks that are each sharded (3: Q, K, V).
_SPLITS = {
    "word_embeddings.weight": (0, 1),
    "attention.query_key_value.weight": (0, 3),
    "attention.query_key_value.bias": (0, 3),
    "attention.dense.weight": (1, 1),
    "mlp.dense_h_to_4h.weight": (0, 1),
    "mlp.dense_h_to_4h.bias": (0, 1),
    "mlp.dense_4h_to_h.weight": (1, 1),
}


def released_name(name: str) -> str:
    """The released layout's name of one of our parameters."""
    if name == f"embedding.{WORDS}":
        return WORDS
    return "transformer." + name.removeprefix("embedding.")


def our_name(name: str) -> str:
    """Our parameter's name of a tensor in the released layout."""
    inner = name.removeprefix("transformer.")
    return inner if inner.startswith(("layers.", "final_layernorm.")) else f"embedding.{inner}"


def in_released_layout(weights: Weights) -> Weights:
    return weights.renamed({released_name(name): name for name in weights.shapes})


def without_prefix(weights: Weights, origin: Path) -> Weights:
    """The tensors without a prefix of their names such as `glm.` or `module.`. Raises: CheckpointError."""
    prefixes = [name.removesuffix(WORDS) for name in weights.shapes if name.endswith(WORDS)]
    if len(prefixes) != 1:
        raise CheckpointError(
            f"{origin} has {len(prefixes)} tensors named {WORDS}; it is not one GLM in the released layout."
        )
    return weights.renamed({name.removeprefix(prefixes[0]): name for name in weights.shapes})


def is_released(weights: Weights) -> bool:
    """Whether the tensors have the names of a released GLM."""
    return any(name.endswith("transformer.block_position_embeddings.weight") for name in weights.shapes)


def open_model_parallel(directory: Path) -> list[Weights]:
    """The shards `mp_rank_00_model_states.pt`, `mp_rank_01_...`, memory-mapped. Raises: CheckpointError."""
    names = sorted(path.name for path in directory.glob("mp_rank_*_model_states.pt"))
    expected = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(len(names))]
    if not names:
        raise CheckpointError(
            f"{directory} holds no mp_rank_XX_model_states.pt; give the directory of one iteration."
        )
    if names != expected:
        missing = next(name for name in expected if name not in names)
        raise CheckpointError(
            f"{directory} has {len(names)} shards but lacks {missing}; fetch the missing shard."
        )
    shards = []
    for path in (directory / name for name in names):
        tree = load_pickle(path)
        size = tree.get("mp_world_size", len(names))
        if size != len(names):
            raise CheckpointError(
                f"{path} is one of {size} shards, but {len(names)} are there; fetch the missing ones."
            )
        module = tree.get("module", tree)
        if not isinstance(module, dict):
            raise CheckpointError(f"{path} has no dictionary of tensors under 'module'.")
        shards.append(without_prefix(from_state_dict(module, path), path))
    return shards


def merged(shards: Sequence[Weights], origin: Path) -> Weights:
    """Whole tensors from model-parallel shards.

    Raises: CheckpointError where shards do not fit together, or disagree on a tensor that each holds whole.
    """
    first = shards[0]
    for rank, shard in enumerate(shards):
        if shard.shapes != first.shapes:
            names = first.shapes.keys() | shard.shapes.keys()
            differing = min(n for n in names if first.shapes.get(n) != shard.shapes.get(n))
            raise CheckpointError(
                f"{origin}: shard {rank} does not fit shard 0 at {differing}; they are of different models."
            )
    shapes = {}
    for name, shape in first.shapes.items():
        split = _split_of(name)
        if split is not None and (len(shape) <= split[0] or shape[split[0]] % split[1]):
            raise CheckpointError(
                f"{origin}: {name} has shape {list(shape)}, which cannot be a shard of a GLM."
            )
        if split is not None:
            shape = tuple(n * len(shards) if i == split[0] else n for i, n in enumerate(shape))
        shapes[name] = shape

    def read(name: str) -> torch.Tensor:
        slices = [shard.read(name) for shard in shards]
        split = _split_of(name)
        if split is not None:
            dim, blocks = split
            # Each rank holds its heads of Q, then K, then V: all of Q are joined first, then K, then V.
            by_block = zip(*(tensor.chunk(blocks, dim) for tensor in slices), strict=True)
            return torch.cat([torch.cat(shares, dim) for shares in by_block], dim)
        for rank, other in enumerate(slices):
            if not torch.equal(other, slices[0]):
                raise CheckpointError(
                    f"{origin}: {name} differs between shards 0 and {rank}, but must be the same in all."
                )
        return slices[0]

    return Weights(shapes, read)


def _split_of(name: str) -> tuple[int, int] | None:
    return next((split for end, split in _SPLITS.items() if name.endswith(end)), None)


def reference_logits(
    shards: Sequence[Weights],
    config: ModelConfig,
    tokens: torch.Tensor,
    position_ids: torch.Tensor,
    block_position_ids: torch.Tensor,
    visible: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [B, S, vocab_size] in `dtype` from the released layout, one layer in memory at a time.

    Args:
        shards: one Weights per model-parallel rank (one for a whole model), names without prefix.
        tokens, position_ids, block_position_ids: int [B, S].
        visible: bool [B, S queries, S keys]; the attention output of a query without any key is 0.
    """

    def get(shard: Weights, name: str) -> torch.Tensor:
        return shard.read(name).to(dtype)

    first = shards[0]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = get(first, f"{name}.weight"), get(first, f"{name}.bias")
        return F.layer_norm(x, x.shape[-1:], weight, bias, config.layernorm_epsilon)

    words = torch.cat([get(shard, WORDS) for shard in shards])
    hidden = words[tokens.long()]
    hidden = hidden + get(first, "transformer.position_embeddings.weight")[position_ids.long()]
    hidden = hidden + get(first, "transformer.block_position_embeddings.weight")[block_position_ids.long()]
    heads = config.num_attention_heads // len(shards)
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))[:, None]
    for i in range(config.num_layers):
        layer = f"transformer.layers.{i}"
        x = norm(hidden, f"{layer}.input_layernorm")
        attended = []
        for shard in shards:
            fused = f"{layer}.attention.query_key_value"
            out = _attend(x, get(shard, f"{fused}.weight"), get(shard, f"{fused}.bias"), heads, bias)
            attended.append(out @ get(shard, f"{layer}.attention.dense.weight").T)
        hidden = hidden + sum(attended) + get(first, f"{layer}.attention.dense.bias")
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        up = f"{layer}.mlp.dense_h_to_4h"
        inner = [F.linear(x, get(s, f"{up}.weight"), get(s, f"{up}.bias")) for s in shards]
        approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        outputs = [
            F.gelu(y, approximate=approximate) @ get(s, f"{layer}.mlp.dense_4h_to_h.weight").T
            for y, s in zip(inner, shards, strict=True)
        ]
        hidden = hidden + sum(outputs) + get(first, f"{layer}.mlp.dense_4h_to_h.bias")
    return norm(hidden, "transformer.final_layernorm") @ words[: config.vocab_size].T


def _attend(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, heads: int, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of one shard's heads, softmax written out: [B, S, D] -> [B, S, heads x head dim]."""
    batch_size, length, _ = x.shape
    q, k, v = (
        block.view(batch_size, length, heads, -1).transpose(1, 2)
        for block in F.linear(x, weight, bias).chunk(3, -1)
    )
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + mask
    probabilities = scores.softmax(-1).nan_to_num(0.0)  # NaN: a query without any key
    return (probabilities @ v).transpose(1, 2).reshape(batch_size, length, -1)
