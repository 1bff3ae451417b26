"""Answers of masked diffusion: what each step fixes, noise, guidance, ends; the source's loop against ours."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.configs import tiny
from support.data.recipes import SPECIAL

from data_utils.common.batch_fields import DOC, FIELDS, ORD, POSITION_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.common.errors import ConfigError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.attention_probe import SINGLE_STACK, AttentionProbe
from megatron_lite.inference.decoders import TextDecoder, _template
from megatron_lite.inference.unmasking import fixed_counts
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import MicroBatch

VOCAB = 130
MASK, EOS = SPECIAL.mask, SPECIAL.eos
TEXT = [11, 12, 13, 14, 15]
MODEL = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position": 40,
}
"""A directory of a random model whose answers differ."""


@pytest.fixture(scope="module")
def config():
    changes = {"positions": "rotary", "init_std": 0.6, **MODEL}
    return tiny(
        *(f"model.{name}={value}" for name, value in changes.items()),
        "objectives={masked_diffusion: 1}",
        "data.sequence_length=40",
    )


@pytest.fixture(scope="module")
def model(config):
    return build_model(config, 40).eval()


def decoder(model, config, **settings):
    (choice,) = config.objective_choices
    generation = GenerationConfig(**{"max_length": 12, **settings})
    return TextDecoder(model, SPECIAL, generation, _template(choice, SPECIAL, set(), generation))


def logits_of(model, tokens):
    """fp64 [N, V] by the batch of training, in which every place has a loss."""
    fields = torch.zeros(len(FIELDS), len(tokens), dtype=torch.int32)
    fields[TOKENS] = torch.tensor(tokens)
    fields[POSITION_IDS] = torch.arange(len(tokens))
    fields[WEIGHTS] = torch.ones(len(tokens)).view(torch.int32)
    assert not fields[ORD].any() and not fields[DOC].any() and not fields[TARGETS].any()
    batch = Batch(fields[None].numpy())
    given = MicroBatch.from_batch(batch, torch.device("cpu"), model.config)
    return model.logits(model._hidden(given)).double()[:, :VOCAB]


def banned():
    ids = set(dataclasses.asdict(SPECIAL).values()) - {EOS}
    return sorted(token for token in ids if token >= 0)


@torch.no_grad()
def by_the_source(model, length, steps, block, guidance=0.0, temperature=0.0, generator=None):
    """generate.py of LLaDA: the loop over blocks and steps, on the whole row, with its own transfer."""
    x = torch.tensor([*TEXT, *[MASK] * length])
    count = length // block
    per_block = steps // count
    for number in range(count):
        begin, end = len(TEXT) + number * block, len(TEXT) + (number + 1) * block
        masks = int((x[begin:end] == MASK).sum())
        schedule = [masks // per_block + (1 if i < masks % per_block else 0) for i in range(per_block)]
        for transferred in schedule:
            logits = logits_of(model, x.tolist())
            if guidance:
                blind = x.clone()
                blind[: len(TEXT)] = MASK
                unconditional = logits_of(model, blind.tolist())
                logits = unconditional + (guidance + 1) * (logits - unconditional)
            logits[:, banned()] = float("-inf")
            noisy = logits
            if temperature:
                u = torch.rand(logits[begin:end].shape, dtype=torch.float64, generator=generator)
                noisy = logits.clone()
                noisy[begin:end] = logits[begin:end].exp() / (-torch.log(u)) ** temperature
            x0 = noisy.argmax(-1)
            confidence = logits.softmax(-1).gather(1, x0[:, None])[:, 0]
            confidence[:begin] = confidence[end:] = float("-inf")
            confidence[x != MASK] = float("-inf")
            chosen = confidence.topk(transferred).indices
            x[chosen] = x0[chosen]
    answer = x[len(TEXT) :].tolist()
    return answer[: answer.index(EOS)] if EOS in answer else answer


def test_counts_of_the_steps():
    assert fixed_counts(10, 4) == [3, 3, 2, 2] and fixed_counts(3, 5) == [1, 1, 1, 0, 0]
    assert all(sum(fixed_counts(n, s)) == n for n in range(1, 20) for s in range(1, 20))


@pytest.mark.parametrize("guidance", [0.0, 1.5])
@pytest.mark.parametrize(("steps", "block"), [(12, 12), (4, 12), (6, 4), (3, 4), (12, 2), (5, 12)])
def test_greedy_answers_match_the_source(model, config, steps, block, guidance):
    settings = {"unmask_steps": steps, "unmask_block": block, "guidance": guidance}
    (found,) = decoder(model, config, **settings).generate([TEXT])
    assert found == by_the_source(model, 12, steps, block, guidance)


def test_settings_matter(model, config):
    """Else the test above shows nothing."""
    found = {
        tuple(decoder(model, config, **settings).generate([TEXT])[0])
        for settings in ({}, {"unmask_steps": 2}, {"unmask_block": 2}, {"guidance": 3.0})
    }
    assert len(found) == 4


def test_drawn_answers_follow_from_the_seed(model, config):
    settings = {"strategy": "sample", "temperature": 0.8, "unmask_steps": 6, "unmask_block": 4}
    twice = [decoder(model, config, **settings, seed=3) for _ in range(2)]
    first, again = (one.generate([TEXT, TEXT]) for one in twice)
    assert first == again and first[0] != first[1]
    assert decoder(model, config, **settings, seed=4).generate([TEXT]) != first[:1]


@pytest.mark.parametrize("seed", range(8))
def test_drawn_answers_match_the_source(model, config, seed):
    """Under much noise, by which other tokens are chosen than the likeliest, but not the place that is fixed."""
    settings = {"strategy": "sample", "temperature": 3.0, "unmask_steps": 6, "unmask_block": 6, "seed": seed}
    generator = decoder(model, config, **settings)._generator()
    expected = by_the_source(model, 12, 6, 6, temperature=3.0, generator=generator)
    assert decoder(model, config, **settings).generate([TEXT]) == [expected]


def test_answers_are_the_same_alone_and_end_before_their_end(model, config):
    made = decoder(model, config)
    together = made.generate([TEXT, TEXT[:2], TEXT[1:]])
    assert together == [decoder(model, config).generate([text])[0] for text in (TEXT, TEXT[:2], TEXT[1:])]
    with torch.no_grad():
        kept = model.embedding.word_embeddings.weight[EOS].clone()
        likely = together[0][4]
        model.embedding.word_embeddings.weight[EOS] = model.embedding.word_embeddings.weight[likely] * 1.01
        ((found,),) = decoder(model, config).hypotheses([TEXT])[0]
        longer = decoder(model, config, min_length=11).generate([TEXT])[0]
        model.embedding.word_embeddings.weight[EOS] = kept
    assert found.ended and EOS not in found.tokens and len(found.tokens) < 11 <= len(longer)


def test_a_replay_shows_each_token_among_all_others(model, config):
    made = decoder(model, config, max_length=6)
    ((found,),) = made.hypotheses([TEXT])[0]
    probe = AttentionProbe(SINGLE_STACK, 0)
    replay = made.replay(TEXT, [found], probe)
    written = [*found.tokens, *[EOS] * found.ended]
    for place in range(len(written)):
        hidden = [*TEXT, *written]
        hidden[len(TEXT) + place] = MASK
        expected = logits_of(model, hidden)[len(TEXT) + place]
        assert torch.allclose(replay.logits[0][place].double(), expected, atol=1e-4)
    assert replay.tokens[SINGLE_STACK][1] == [*TEXT, *written]
    assert probe.matrix(len(TEXT) + len(written)).shape[1:] == (len(TEXT) + len(written),) * 2


def test_settings_of_other_ways_are_refused(model, config):
    for settings in ({"strategy": "beam"}, {"strategy": "sample", "top_k": 3}, {"no_repeat_ngram_size": 2}):
        with pytest.raises(ConfigError, match="generates by unmasking"):
            decoder(model, config, **settings).generate([TEXT])
    (causal,) = tiny("objectives={causal: 1}").objective_choices
    for settings in ({"unmask_steps": 3}, {"unmask_block": 3}, {"guidance": 1.0}):
        with pytest.raises(ConfigError, match=r"trained on causal, .* remove it"):
            _template(causal, SPECIAL, set(), GenerationConfig(**settings))
