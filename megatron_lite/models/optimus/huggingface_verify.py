"""Outputs of transformers' classes for a directory of OPTIMUS, to compare ours with.

    posteriors   of sentences of several lengths, through the encoder's class
    logits       given latent vectors, through GPT2LMHeadModel, where the memory is a cache of length 1 and W_D z is
                 added to the word embeddings

Shapes: N sentences, T tokens, P latent size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.config_json import by_transformers
from megatron_lite.hf.common.verify import Check
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.source import load_class
from megatron_lite.hf.published.systems import published_system
from megatron_lite.models.optimus.config import decoder_of, latent_of
from megatron_lite.models.optimus.interface import Sentence
from megatron_lite.models.optimus.open_run import LatentRun, Rows, longest_sentence

_DECODER_CLASS = "GPT2LMHeadModel"
Latent = Mapping[str, torch.Tensor]  # the matrices between the stacks, by their names in the directory


@torch.no_grad()
def optimus_checks(
    encoder: Path,
    decoder: Path,
    matrices: Weights,
    config: Config,
    tokenizers: tuple[Tokenizer, Tokenizer],
    dtype: torch.dtype,
) -> list[Check]:
    """Outputs of the classes of encoder and decoder, computed in `dtype`.

    Args: encoder, decoder: their directories. tokenizers: of both.
    """
    latent = {name: matrices.read(name).to(dtype) for name in matrices.shapes}
    generator = torch.Generator().manual_seed(0)
    return [
        _posterior_check(encoder, config, tokenizers[0], latent, generator, dtype),
        _logits_check(decoder, config, tokenizers[1], latent, generator, dtype),
    ]


def _posterior_check(
    directory: Path,
    config: Config,
    tokenizer: Tokenizer,
    latent: Latent,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Check:
    """The posteriors' parameters [N, 2 P] of sentences of several lengths."""
    model, special = config.model, tokenizer.special
    assert model.vocab_size is not None
    longest, sentences, expected = min(longest_sentence(config), 200), [], []
    theirs = load_class(directory, published_system(model).pretraining_class(model), dtype)
    base = getattr(theirs, theirs.base_model_prefix)  # type: ignore[call-overload]
    # Several lengths: a wrong mask or position shows only where rows differ.
    for length in {longest, max(1, longest // 2), 1}:
        random = torch.randint(model.vocab_size, (length,), generator=generator)
        drawn = random.masked_fill(random == base.config.pad_token_id, special.unk).tolist()
        sentences.append(Sentence("", drawn, [special.unk]))
        tokens = torch.tensor([[special.cls, *drawn, special.sep]])
        with by_transformers(directory):
            out = base(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        feature = out.pooler_output if latent_of(config).feature == "pooler" else out.last_hidden_state[:, 0]
        expected.append(feature @ latent["posterior.weight"].T)

    def compute(ours: LatentRun) -> torch.Tensor:
        return torch.cat([torch.cat(ours.encode([sentence]), dim=1) for sentence in sentences])

    return Check("posteriors", torch.cat(expected), compute)


def _logits_check(
    directory: Path,
    config: Config,
    tokenizer: Tokenizer,
    latent: Latent,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Check:
    """The decoder's logits for three texts of BOS and random tokens, each with its own latent vector."""
    vocab_size, begin = decoder_of(config).vocab_size, tokenizer.special.sop
    assert vocab_size is not None
    z = torch.randn(3, latent_of(config).latent_size, generator=generator)
    drawn = torch.randint(vocab_size, (3, min(longest_sentence(config), 200)), generator=generator)
    tokens = torch.cat([torch.full((3, 1), begin), drawn], dim=1)
    # The class reads the memory as a cache of length 1, so that its positions begin at 1; ours has a slot
    # before the first token.
    has_memory = "memory.weight" in latent
    with_slot = torch.cat([tokens[:, :1], tokens], dim=1) if has_memory else tokens
    decoder = load_class(directory, _DECODER_CLASS, dtype)
    with by_transformers(directory):
        expected = their_logits(decoder, latent, tokens, z.to(dtype))

    def compute(ours: LatentRun) -> torch.Tensor:
        return Rows(ours.model, z, begin, has_memory).read(with_slot, has_memory)[:, has_memory:]

    return Check("logits", expected, compute)


def their_logits(
    gpt2: torch.nn.Module, latent: Latent, tokens: torch.Tensor, z: torch.Tensor
) -> torch.Tensor:
    """Logits of GPT2LMHeadModel given latent vectors: int64 [N, T], [N, P] -> [N, T, V]."""
    decoder: Any = gpt2
    embedded, cache = decoder.transformer.wte(tokens), None
    if "embedding.weight" in latent:
        embedded = embedded + (z @ latent["embedding.weight"].T)[:, None]
    if "memory.weight" in latent:
        cache, heads = DynamicCache(), decoder.config.n_head
        memory = (z @ latent["memory.weight"].T).view(len(z), decoder.config.n_layer, heads, 1, -1)
        for layer in range(decoder.config.n_layer):
            cache.update(memory[:, layer], memory[:, layer], layer)
    places = torch.arange(tokens.shape[1])[None] + (cache is not None)
    return decoder(inputs_embeds=embedded, position_ids=places, past_key_values=cache).logits
