"""What released files hold that today's classes do not write, for each system: a table of facts with their sources.

A fact that was read names the release of transformers whose modeling or configuration file says it, or a public report;
"believed" is not read, but follows from the class that wrote the files. Sizes here are small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.hf.published import CASES, random_model
from support.hf.published_files import write_tokenizer

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Released:
    """Files of a system as they were released.

    Args:
        case: of `CASES`, with the sizes.
        extra: (fields of config.json) -> tensors that today's class does not have.
        left_out: names of those that an import leaves out and names; the others say what today's tensors say.
        absent: fields of config.json that they lack.
        fields: that they have.
        prefix: of today's names, that theirs lack.
        class_name: that writes them; None: the case's.
        named: modules that the line of an import names.
        source: of each fact.
    """

    case: str
    source: str
    extra: Callable[[Mapping[str, Any]], Tensors] = lambda sizes: {}
    duplicates: Mapping[str, str] = field(default_factory=dict)  # second name of a tensor -> the first
    absent: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    class_name: str | None = None
    named: tuple[str, ...] = ()


def _linear(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.weight": torch.randn(rows, columns), f"{name}.bias": torch.randn(rows)}


def _norm(name: str, width: int) -> Tensors:
    return {f"{name}.weight": torch.randn(width), f"{name}.bias": torch.randn(width)}


def _pooler(prefix: str, positions: bool = True, module: str = "pooler.dense") -> Callable[..., Tensors]:
    def tensors(sizes: Mapping[str, Any]) -> Tensors:
        width, places = sizes["hidden_size"], sizes["max_position_embeddings"]
        numbers = {f"{prefix}embeddings.position_ids": torch.arange(places)[None]} if positions else {}
        return _linear(f"{prefix}{module}", width, width) | numbers

    return tensors


def _of_layers(name: str, tensor: Callable[[Mapping[str, Any]], torch.Tensor]) -> Callable[..., Tensors]:
    def tensors(sizes: Mapping[str, Any]) -> Tensors:
        count = sizes.get("num_hidden_layers", sizes.get("n_layer", 0))
        return {name.format(i): tensor(sizes) for i in range(count)}

    return tensors


def _joined(*parts: Callable[..., Tensors]) -> Callable[..., Tensors]:
    return lambda sizes: {name: x for part in parts for name, x in part(sizes).items()}


def _mask(kind: torch.dtype) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    return lambda sizes: torch.ones(1, 1, *2 * [sizes["n_positions"]]).tril().to(kind)


def _frequencies(name: str) -> Callable[..., Tensors]:
    return _of_layers(name, lambda sizes: 1.0 / 1e4 ** torch.arange(0, 1, 0.25))


def _replaced(sizes: Mapping[str, Any]) -> Tensors:
    width = sizes["hidden_size"]
    return {
        **_linear("mask_predictions.dense", width, width), **_norm("mask_predictions.LayerNorm", width),
        **_linear("mask_predictions.classifier", 1, width),
        "deberta.embeddings.position_embeddings.weight": torch.randn(sizes["max_position_embeddings"], width),
    }  # fmt: skip


_POOLED = (
    "poolers: `_keys_to_ignore_on_load_unexpected = [pooler]` of transformers 4.20; position_ids: its buffers"
)
_HEAD = {"lm_head.decoder.bias": "lm_head.bias"}
_OF_ROBERTA = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight", **_HEAD}
_VERSION_4 = "rope_theta and inv_freq: transformers 4.57's configuration; transformers' pull request 35255"
_ROPE = {"rope_theta": 1e4, "torch_dtype": "float32", "transformers_version": "4.31.0"}
_INV_FREQ = "model.layers.{}.self_attn.rotary_emb.inv_freq"


def _llama(case: str) -> Released:
    return Released(
        case, _VERSION_4, _frequencies(_INV_FREQ), absent=("rope_parameters", "dtype"), fields=_ROPE,
        named=("self_attn.rotary_emb.inv_freq",),
    )  # fmt: skip


RELEASED: dict[str, Released] = {
    "bert": Released(
        "bert, masked LM", f"{_POOLED}; no model_type: configurations of pytorch-pretrained-bert and rxnfp 0.1.0",
        _pooler("bert."), {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
        absent=("model_type", "architectures", "transformers_version", "dtype"), named=("bert.pooler.dense.*",),
    ),
    "bert, no next sentence": Released(
        "bert, masked LM", "a head that compares segments, without the layer below: believed",
        lambda sizes: _linear("cls.seq_relationship", 2, sizes["hidden_size"]), named=("cls.seq_relationship.*",),
    ),
    "ernie": Released(
        "ernie", f"{_POOLED} (ERNIE's class is a copy of BERT's); with ErnieForMaskedLM: believed", _pooler("ernie."),
        class_name="ErnieForMaskedLM", named=("ernie.pooler.dense.*",),
    ),
    "roberta": Released(
        "roberta", f"{_POOLED}; roberta-base's names: transformers' issue 8407", _pooler("roberta."), _OF_ROBERTA,
        named=("roberta.pooler.dense.*", "roberta.embeddings.position_ids"),
    ),
    "xlm_roberta": Released(
        "xlm_roberta", f"{_POOLED}; xlm-roberta-large: Unbabel/COMET's issue 59", _pooler("roberta."), _OF_ROBERTA,
        named=("roberta.pooler.dense.*",),
    ),
    "camembert": Released(
        "camembert", f"{_POOLED} (CamemBERT's class is RoBERTa's there)", _pooler("roberta."), _OF_ROBERTA,
        named=("roberta.pooler.dense.*",),
    ),
    "albert": Released(
        "albert, odd", f"{_POOLED}; fields of version 1: rxnmapper 0.4.3's directory",
        _pooler("albert.", module="pooler"),
        {"predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
         "predictions.decoder.bias": "predictions.bias"},
        fields={"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0},
        named=("albert.pooler.*",),
    ),
    "electra_generator": Released(
        "electra_generator, odd", "embeddings_project of equal widths: `_keys_to_ignore_on_load_unexpected` of 4.20",
        lambda sizes: _linear("electra.embeddings_project", *2 * [sizes["hidden_size"]]),
        {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        absent=("architectures",), named=("electra.embeddings_project.*",),
    ),
    "deberta_v3": Released(
        "deberta_v3",
        "no legacy, terms as text: transformers 4.57's configuration and a public copy of v3-small's; mask_predictions "
        "and position_embeddings: its `_keys_to_ignore_on_load_unexpected`",
        _replaced, absent=("legacy", "architectures"), fields={"pos_att_type": "p2c|c2p"},
        named=("mask_predictions.*", "deberta.embeddings.position_embeddings.weight"),
    ),
    "deberta_v2, legacy": Released(
        "deberta_v3, odd", "`cls.predictions` before the field legacy: transformers 4.20", absent=("legacy",),
    ),
    "gpt": Released(
        "gpt", "buffers of transformers 3.5's modeling_openai.py; names without prefix: believed",
        _joined(_of_layers("transformer.h.{}.attn.bias", _mask(torch.float32)),
                lambda sizes: {"transformer.position_ids": torch.arange(sizes["n_positions"])}),
        {"lm_head.weight": "transformer.tokens_embed.weight"}, prefix="transformer.",
        named=("h.*.attn.bias", "position_ids"),
    ),
    "gpt2": Released(
        "gpt2", "buffers of transformers 4.20's modeling_gpt2.py; names without prefix: believed",
        _joined(_of_layers("transformer.h.{}.attn.bias", _mask(torch.uint8)),
                _of_layers("transformer.h.{}.attn.masked_bias", lambda sizes: torch.tensor(-1e4))),
        {"lm_head.weight": "transformer.wte.weight"}, prefix="transformer.", absent=("model_type",),
        fields={"n_ctx": 160}, named=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    "xlnet": Released(
        "xlnet", "both ends of the tie: believed", duplicates={"lm_loss.weight": "transformer.word_embedding.weight"},
    ),
    "bart": Released(
        "bart", "versions: `_keys_to_ignore_on_load_unexpected` of 4.20; fields: configuration_bart.py of 3.5",
        lambda sizes: {"model.encoder.version": torch.tensor([3.0]), "model.decoder.version": torch.tensor([3.0])},
        {f"{name}.weight": "model.shared.weight"
         for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")},
        fields={"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False,
                "static_position_embeddings": False, "add_bias_logits": False, "extra_pos_embeddings": 2,
                "encoder_layerdrop": 0.1},
        named=("model.encoder.version", "model.decoder.version"),
    ),
    **{
        name: Released(
            name, "the table of cross attention: `_keys_to_ignore_on_load_unexpected` of 4.20; ends of ties: 4.57",
            lambda sizes: {
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight":
                    torch.randn(32, sizes["num_heads"]),
            },
            {f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")},
            named=("EncDecAttention.relative_attention_bias.weight",),
        )
        for name in ("t5", "t5_1_1", "mt5")
    },
    "t5, of its first release": Released(
        "t5", "the class's first name: copies of t5-small's first configuration in public repositories",
        fields={"architectures": ["T5WithLMHeadModel"]},
        absent=("model_type",),
    ),
    **{name: _llama(name) for name in ("llama", "mistral", "qwen2", "qwen3", "eurobert")},
    "glm4": Released(
        "glm4", _VERSION_4, _frequencies("model.layers.{}.self_attn.rotary_emb.inv_freq"),
        absent=("rope_parameters",), fields={"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        named=("rotary_emb.inv_freq",),
    ),
    "modernbert": Released(
        "modernbert, older", "frequencies of each layer: believed",
        _frequencies("model.layers.{}.attn.rotary_emb.inv_freq"), named=("attn.rotary_emb.inv_freq",),
    ),
    "modernbert_decoder": Released(
        "modernbert_decoder", "sliding_window alone: configuration_modernbert_decoder.py of transformers 4.57",
        absent=("local_attention",), fields={"sliding_window": 8},
    ),
}  # fmt: skip


def write_released(name: str, directory: Path) -> tuple[torch.nn.Module, Tensors]:
    """The directory of a release. Returns: today's model of it, and its tensors under today's names."""
    found = RELEASED[name]
    directory.mkdir()
    size = write_tokenizer(found.case.partition(",")[0], directory)
    model = random_model(found.case, class_name=found.class_name, vocab_size=size)
    model.save_pretrained(directory)
    state, sizes = load_file(directory / "model.safetensors"), CASES[found.case][1]
    more = found.extra(sizes) | {second: state[first].clone() for second, first in found.duplicates.items()}
    (directory / "model.safetensors").unlink()
    written = {key.removeprefix(found.prefix): tensor for key, tensor in (state | more).items()}
    torch.save(written, directory / "pytorch_model.bin")
    path = directory / "config.json"
    described = {key: x for key, x in json.loads(path.read_text()).items() if key not in found.absent}
    path.write_text(json.dumps(described | dict(found.fields)))
    return model, state
