"""GLM (autoregressive blank infilling, arXiv:2103.10360) for transformers. Part of an export's code.

One stack reads part A, the text with its blanks, in both directions, and part B, the spans that fill them, from left to
right. `block_position_ids` is 0 in part A and 1, 2, ... within a span of part B, and the attention mask follows from
it: all tokens see part A, and a token of part B also sees part B up to itself. `position_ids` is the position in the
text; all tokens of a span have the position of their blank. Without `block_position_ids` the whole input is part A and
the model is a bidirectional encoder. Local layers see near positions only (`attention_window`).

`attention_mask` marks padding (0) as usual. A boolean one of shape [B, 1, S, K] replaces the rule, for example for
packed documents. Padding tokens see nothing.

Trade-offs: attention is torch's scaled_dot_product_attention with a boolean mask of B x S x K; no attention weights
are returned. Dynamic key/value caches only. Labels are not shifted: the label at a position is what that position
predicts, as in training.

Versions 4.46 to 5 of transformers run this file. Where they differ it follows the version that it finds: the name of a
cache in arguments and outputs (`_CACHE`), and the functions that initialize weights (`init`).

Shapes: B batch, S new tokens, K all tokens (cached and new), D hidden size, H heads, V vocabulary, C choices.
"""

# transformers annotates its base classes more narrowly than it lets them be used.
# mypy: ignore-errors

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MultipleChoiceModelOutput,
    SequenceClassifierOutput,
)

from .configuration_glm import GLMConfig
from .positions_glm import CosSin, GLMEmbedding, apply_rotary, rotary_cos_sin, window_mask

try:  # since version 5: skips weights that are already loaded
    from transformers import initialization as init
except ImportError:  # version 4 calls _init_weights only for modules that are not loaded
    from torch.nn import init

if TYPE_CHECKING:  # never imported, but transformers saves the files named in imports along with the model
    from .pipeline_glm import BlankInfillingPipeline  # noqa: F401

# The name of key/value caches in arguments and outputs: "cache" since 5.24, "past_key_values" before.
_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def outputs_or_tuple(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Give `forward` the argument return_dict of transformers; False = a tuple of the outputs that are not None."""

    @functools.wraps(forward)
    def wrapped(self, *args, return_dict: bool | None = None, **kwargs):
        outputs = forward(self, *args, **kwargs)
        is_named = self.config.return_dict if return_dict is None else return_dict
        return outputs if is_named else outputs.to_tuple()

    return wrapped


def visible_keys(
    block_position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    length: int,
    past_length: int,
) -> torch.Tensor | None:
    """Which keys the new tokens may attend to: bool [B, 1, S, K]; None where each sees every key.

    New tokens see everything in the cache, so part A must be one forward pass, not several.

    Args:
        block_position_ids: int [B, S] of the new tokens; None = all are part A.
        attention_mask: [B, K], 0 = padding, or bool [B, 1, S, K], which is returned; None = no padding.
        length, past_length: S, and how many tokens the cache holds.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask.bool()
    visible = None
    sees_all = length == 1 and past_length  # a single new token sees the whole cache
    if block_position_ids is not None and not sees_all:
        in_part_b = block_position_ids > 0
        causal = torch.ones(length, length, dtype=torch.bool, device=in_part_b.device).tril()
        visible = ~in_part_b[:, None, :] | (in_part_b[:, :, None] & causal)
        visible = F.pad(visible, (past_length, 0), value=True)[:, None]
    if attention_mask is not None:
        if attention_mask.shape[-1] != past_length + length:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[-1]} columns; it must cover the {past_length} "
                f"cached and the {length} new tokens."
            )
        is_token = attention_mask.bool()
        unpadded = is_token[:, None, -length:, None] & is_token[:, None, None, :]
        visible = unpadded if visible is None else visible & unpadded
    return visible


def make_norm(config: GLMConfig) -> nn.Module:
    """LayerNorm, or RMSNorm, which has no bias."""
    norm_class = nn.RMSNorm if config.rms_norm else nn.LayerNorm
    return norm_class(config.hidden_size, config.layernorm_epsilon)


class GLMOutputProjection(nn.Linear):
    """A linear layer into the residual stream. A class only because `_init_weights` scales its weights."""


class GLMAttention(nn.Module):
    """Fused Q|K|V projection (contiguous thirds), scaled dot product, output projection."""

    def __init__(self, config: GLMConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        has_bias = config.biases == "all"
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=has_bias)
        self.dense = GLMOutputProjection(config.hidden_size, config.hidden_size, bias=has_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        visible: torch.Tensor | None,
        no_keys: torch.Tensor | None,
        cos_sin: CosSin | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Args: hidden: [B, S, D]. visible: bool [B, 1, S, K]. no_keys: bool [B, 1, S, 1], queries without any key."""
        batch_size, length, _ = hidden.shape
        heads = self.query_key_value(hidden).view(batch_size, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        q, k = apply_rotary(q, cos_sin), apply_rotary(k, cos_sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout)
        if no_keys is not None:
            out = out.masked_fill(no_keys, 0.0)
        return self.dense(out.transpose(1, 2).reshape(batch_size, length, -1))


class GLMMLP(nn.Module):
    """gelu(x W1) W2; gated: (gelu(x Wg) * x W1) W2, with Wg and W1 as one matrix."""

    def __init__(self, config: GLMConfig):
        super().__init__()
        self.approximate = {"tanh": "tanh", "erf": "none"}[config.gelu]
        self.is_gated, has_bias = config.ffn == "gated", config.biases == "all"
        inner = config.ffn_size or 4 * config.hidden_size
        self.dense_h_to_4h = nn.Linear(config.hidden_size, inner * (1 + self.is_gated), bias=has_bias)
        self.dense_4h_to_h = GLMOutputProjection(inner, config.hidden_size, bias=has_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.dense_h_to_4h(hidden)
        if not self.is_gated:
            return self.dense_4h_to_h(F.gelu(inner, approximate=self.approximate))
        gate, value = inner.chunk(2, dim=-1)
        return self.dense_4h_to_h(F.gelu(gate, approximate=self.approximate) * value)


class GLMBlock(nn.Module):
    """x + dropout(attention(LN(x))), then the same with the MLP."""

    gradient_checkpointing = (
        False  # set, like _gradient_checkpointing_func, by `gradient_checkpointing_enable`
    )

    def __init__(self, config: GLMConfig, layer: int):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.attention = GLMAttention(config, layer)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = GLMMLP(config)
        self.dropout = nn.Dropout(config.output_dropout)

    def __call__(self, hidden: torch.Tensor, *attention, cache: Cache | None = None) -> torch.Tensor:
        if self.gradient_checkpointing and self.training:  # no cache: it would hold the keys of both passes
            return self._gradient_checkpointing_func(super().__call__, hidden, *attention)
        return super().__call__(hidden, *attention, cache=cache)

    def forward(
        self,
        hidden: torch.Tensor,
        visible: torch.Tensor | None = None,
        no_keys: torch.Tensor | None = None,
        cos_sin: CosSin | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.dropout(self.attention(normed, visible, no_keys, cos_sin, cache))
        return hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))


class GLMPreTrainedModel(PreTrainedModel):
    config_class = GLMConfig
    base_model_prefix = "glm"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_cache_class = True  # asked by versions before 4.56
    _no_split_modules = ["GLMBlock"]  # noqa: RUF012  what transformers expects here
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range); the two projections into the residual stream are scaled by 1/sqrt(2L)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            layers = self.config.num_layers if isinstance(module, GLMOutputProjection) else 0.5
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range / math.sqrt(2 * layers))
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)


class GLMModel(GLMPreTrainedModel):
    """The stack without a head: hidden states after the final LayerNorm."""

    def __init__(self, config: GLMConfig):
        super().__init__(config)
        self.embedding = GLMEmbedding(config)
        self.layers = nn.ModuleList([GLMBlock(config, i) for i in range(config.num_layers)])
        self.final_layernorm = make_norm(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.word_embeddings = value

    @outputs_or_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        block_position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        key_position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: int [B, S]; or inputs_embeds [B, S, D].
            attention_mask: see the module's docstring.
            position_ids, block_position_ids: int [B, S]; None = the whole input is part A.
            past_key_values, or cache: keys and values of earlier tokens; attention_mask then covers these too.
            key_position_ids: int [B, K], which local layers need with a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds.")
        embeds = self.embedding.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        past_length = 0 if cache is None else cache.get_seq_length()
        if getattr(cache, "is_compileable", False):
            raise ValueError("GLM works with dynamic caches; leave cache_implementation at its default.")
        visible = visible_keys(block_position_ids, attention_mask, embeds.shape[1], past_length)
        no_keys = None
        if visible is not None and attention_mask is not None:
            no_keys = ~visible.any(-1, keepdim=True)
            visible = (
                visible | no_keys
            )  # the softmax of no keys would be NaN; attention sets these outputs to 0
        if position_ids is None:
            if block_position_ids is not None:
                raise ValueError(
                    "block_position_ids need position_ids: a span has the position of its blank."
                )
            key_position_ids = self._default_positions(attention_mask, embeds, past_length)
            position_ids = key_position_ids[:, -embeds.shape[1] :]
        if block_position_ids is None:
            block_position_ids = torch.zeros_like(position_ids)
        key_positions = key_position_ids if past_length else position_ids
        near = window_mask(self.config, visible, position_ids, key_positions)
        base = self.config.rotary_base
        rotary = rotary_cos_sin(self.config, position_ids, block_position_ids, base)
        local_base = self.config.rotary_base_local or base
        local_rotary = rotary_cos_sin(self.config, position_ids, block_position_ids, local_base)

        hidden = self.embedding(embeds, position_ids, block_position_ids)
        states = [hidden] if output_hidden_states else None
        for number, layer in enumerate(self.layers):
            is_local = number % self.config.global_every > 0
            attention = (near, no_keys, local_rotary) if is_local else (visible, no_keys, rotary)
            hidden = layer(hidden, *attention, cache=cache)
            if states is not None:
                states.append(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=self.final_layernorm(hidden),
            hidden_states=None if states is None else tuple(states),
            **{_CACHE: cache if use_cache else None},
        )

    def _default_positions(
        self, attention_mask: torch.Tensor | None, embeds: torch.Tensor, past_length: int
    ) -> torch.Tensor:
        """Positions 0, 1, 2, ... of the tokens that are not padding, cached ones included: int [B, K]."""
        batch_size, length, _ = embeds.shape
        if attention_mask is None or attention_mask.dim() != 2:
            attention_mask = torch.ones(1, past_length + length, device=embeds.device).expand(batch_size, -1)
        limit = self.config.max_position + 1
        tokens = past_length + length if past_length + length <= limit else int(attention_mask.sum(-1).max())
        if tokens > limit:
            raise ValueError(
                f"a text has {tokens} tokens, but the model has positions for {limit}; shorten it."
            )
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


class GLMWithVocabulary(GLMPreTrainedModel):
    """The stack with the output projection, tied to the word embedding."""

    _tied_weights_keys = {"lm_head.weight": "glm.embedding.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: GLMConfig):
        super().__init__(config)
        self.glm = GLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value


class GLMForBlankInfilling(GLMWithVocabulary, GenerationMixin):
    """Predicts the spans of part B. For `generate` the input ends in sop: `build_inputs_for_generation`."""

    @outputs_or_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        block_position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        key_position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """As GLMModel; in addition:

        Args:
            labels: int [B, S], the target at each position (not shifted); -100 = no loss. The loss is their mean.
            logits_to_keep: compute logits of the last `logits_to_keep` positions only; 0 = all.
        """
        outputs = self.glm(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            block_position_ids=block_position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            key_position_ids=key_position_ids,
            cache=cache,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, -logits_to_keep:].flatten())
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{_CACHE: getattr(outputs, _CACHE)},
        )

    # `generate` calls the methods below. A new token has the position of its blank and the next block position.

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        block_position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> dict:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["block_position_ids"] = block_position_ids[:, -inputs["input_ids"].shape[1] :]
        inputs["key_position_ids"] = kwargs["position_ids"]
        return inputs

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict
    ) -> torch.Tensor:
        raise ValueError(
            "generate() needs position_ids and block_position_ids, and input_ids that end in sop; call "
            "tokenizer.build_inputs_for_generation(tokenizer(text)) and pass all it returns."
        )

    def _validate_model_kwargs(self, model_kwargs: dict) -> None:
        self.config.require_blank_infilling()
        if model_kwargs.get("block_position_ids") is None:
            self._prepare_position_ids_for_generation(model_kwargs.get("input_ids"), model_kwargs)
        super()._validate_model_kwargs(model_kwargs)

    def _validate_generated_length(
        self, generation_config, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        new = generation_config.max_length - input_ids_length
        if new > self.config.max_position:
            raise ValueError(
                f"{new} new tokens were asked for, but block positions end at {self.config.max_position}; "
                "set a smaller max_new_tokens."
            )
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)

    def _update_model_kwargs_for_generation(
        self, outputs, model_kwargs: dict, is_encoder_decoder: bool = False, num_new_tokens: int = 1
    ) -> dict:
        positions, block_positions = model_kwargs["position_ids"], model_kwargs["block_position_ids"]
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )
        blank = positions[:, -1:].expand(-1, num_new_tokens)
        steps = torch.arange(1, num_new_tokens + 1, device=positions.device)
        model_kwargs["position_ids"] = torch.cat([positions, blank], dim=1)
        model_kwargs["block_position_ids"] = torch.cat(
            [block_positions, block_positions[:, -1:] + steps], dim=1
        )
        return model_kwargs


class GLMForSequenceClassification(GLMPreTrainedModel):
    """A linear layer on the first token ([CLS]) of each text."""

    def __init__(self, config: GLMConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.glm = GLMModel(config)
        self.dropout = nn.Dropout(config.output_dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @outputs_or_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        block_position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """As GLMModel; in addition:

        Args:
            labels: int [B] (cross entropy), float [B] where num_labels is 1 (squared error), or float [B, num_labels]
                (binary cross entropy of each label).
        """
        outputs = self.glm(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            block_position_ids=block_position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        first = torch.zeros(hidden.shape[0], dtype=torch.long, device=hidden.device)
        if attention_mask is not None and attention_mask.dim() == 2:  # after padding on the left
            first = attention_mask.long().argmax(-1)
        pooled = hidden[torch.arange(hidden.shape[0], device=hidden.device), first]
        logits = self.score(self.dropout(pooled))
        loss = None if labels is None else self._loss(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.num_labels == 1:
            return F.mse_loss(logits.squeeze(-1), labels.float())
        if labels.dim() == 2:
            return F.binary_cross_entropy_with_logits(logits, labels.float())
        return F.cross_entropy(logits, labels)


class GLMForMultipleChoice(GLMWithVocabulary):
    """Scores each choice by the log probability of its tokens in the blank. It adds no parameters to the model."""

    @outputs_or_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        choice_labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        block_position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> MultipleChoiceModelOutput:
        """
        Args:
            input_ids, attention_mask, position_ids, block_position_ids: int [B, C, S]; the choice is a span
            of part B. choice_labels: int [B, C, S], the token that each position predicts; -100 = not in
            the score. labels: int [B], the right choice.
        Returns: logits [B, C] in nats, and with labels the cross entropy over the choices.
        """
        flat = [
            None if x is None else x.flatten(0, 1) for x in (attention_mask, position_ids, block_position_ids)
        ]
        outputs = self.glm(
            input_ids.flatten(0, 1),
            attention_mask=flat[0],
            position_ids=flat[1],
            block_position_ids=flat[2],
            use_cache=False,
            return_dict=True,
        )
        targets = choice_labels.flatten(0, 1)
        is_scored = targets != -100
        logits = self.lm_head(outputs.last_hidden_state[is_scored]).float()
        losses = F.cross_entropy(logits, targets[is_scored], reduction="none")
        scores = torch.zeros_like(targets, dtype=losses.dtype).masked_scatter(is_scored, -losses).sum(-1)
        scores = scores.view(input_ids.shape[:2])
        loss = None if labels is None else F.cross_entropy(scores, labels)
        return MultipleChoiceModelOutput(loss=loss, logits=scores)


GLMModel.register_for_auto_class("AutoModel")
GLMForBlankInfilling.register_for_auto_class("AutoModelForSeq2SeqLM")
GLMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
GLMForMultipleChoice.register_for_auto_class("AutoModelForMultipleChoice")
