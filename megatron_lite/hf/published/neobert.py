"""The table of NeoBERT, with the names of its repository (see system_table.py). Transformers has no class for it.

Its blocks are Llama's, with bidirectional attention. Rotary positions rotate adjacent pairs, as ours do. The rows of
the fused projection are in order of heads, each with its query, key and value. The gated FFN has two thirds of
`intermediate_size`, rounded up to a multiple of 8, and `max_length` is the number of positions.

Source: chandar-lab/NeoBERT, neobert.model, and the code published with the weights.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from megatron_lite.hf.common.system_table import (
    ConfigField,
    PublishedSystem,
    TensorRule,
    WeightTransform,
    prefixed,
)

_CLASSES = {"AutoConfig": "NeoBERTConfig", "AutoModel": "NeoBERT", "AutoModelForMaskedLM": "NeoBERTLMHead"}


class NeoBertConfig(PretrainedConfig):
    """The config.json. Args: positions, ffn_width: replace max_length and intermediate_size, from which they follow.

    transformers takes `max_length` for a setting of generation and removes it, hence `positions`.
    """

    model_type = "neobert"

    def __init__(
        self, vocab_size: int = 30522, hidden_size: int = 768, num_hidden_layers: int = 28,
        num_attention_heads: int = 12, intermediate_size: int = 3072, norm_eps: float = 1e-6, max_length: int = 1024,
        decoder_init_range: float = 0.02, pad_token_id: int | None = 0, positions: int | None = None,
        ffn_width: int | None = None, **fields: Any,
    ):  # fmt: skip
        if ffn_width not in (None, _width(intermediate_size)):
            intermediate_size = 3 * ffn_width // 2  # type: ignore[operator]
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.intermediate_size = num_attention_heads, intermediate_size
        self.norm_eps, self.decoder_init_range, self.pad_token_id = norm_eps, decoder_init_range, pad_token_id
        self.positions, self.ffn_width = positions or max_length, _width(intermediate_size)
        code = {auto: f"chandar-lab/NeoBERT--model.{name}" for auto, name in _CLASSES.items()}
        super().__init__(**{**fields, "auto_map": code})

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        del values["ffn_width"]
        return values | {"max_length": values.pop("positions")}


def _width(intermediate_size: int) -> int:
    return -(-int(2 * intermediate_size / 3) // 8) * 8


CONFIG_MAPPING.register(NeoBertConfig.model_type, NeoBertConfig, exist_ok=True)
# Their matrix rows are [H, 3, d], ours [3, H, d].
_BY_HEAD = WeightTransform(
    lambda x, config: x.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2),
    lambda x, config: x.unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2),
)
_BLOCK = [
    TensorRule("input_layernorm", ("attention_norm",)),
    TensorRule("attention.query_key_value", ("qkv",), _BY_HEAD),
    TensorRule("attention.dense", ("wo",)), TensorRule("post_attention_layernorm", ("ffn_norm",)),
    TensorRule("mlp.dense_h_to_4h", ("ffn.w12",)), TensorRule("mlp.dense_4h_to_h", ("ffn.w3",)),
]  # fmt: skip
NEOBERT = PublishedSystem(
    model_type="neobert", prefix="model.",
    rules=(
        TensorRule("embedding.word_embeddings", ("model.encoder",)),
        *prefixed(_BLOCK, "layers.{i}.", "model.transformer_encoder.{i}."),
        TensorRule("final_layernorm", ("model.layer_norm",)), TensorRule("heads.vocabulary", ("decoder",)),
        TensorRule("heads", ("decoder",)),
    ),
    fields=(
        ConfigField("vocab_size", "vocab_size"), ConfigField("num_hidden_layers", "num_layers"),
        ConfigField("hidden_size", "hidden_size"), ConfigField("num_attention_heads", "num_attention_heads"),
        ConfigField("ffn_width", "ffn_size"), ConfigField("positions", "max_position", counts_positions=True),
        ConfigField("norm_eps", "layernorm_epsilon"), ConfigField("decoder_init_range", "init_std"),
    ),
    pretraining_class=lambda config: "NeoBERTLMHead", classes={"NeoBERTLMHead": "neobert"}, required={},
    roles={"pad_token_id": "pad"},
)  # fmt: skip
