"""Draws of the generator: numbers of Philox, the distribution, and the same draw for any split of the vocabulary."""

import numpy as np
import pytest
import torch
from support.data.chi_square import chi_square, chi_square_limit
from support.distributed import run_ranks

from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.models.electra.sampling import draw, gumbel, philox
from megatron_lite.transformer.tensor_parallel import TensorParallel, VocabParallelEmbedding

VOCAB = 301
SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": VOCAB}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, expected):
    """Those of Random123's kat_vectors."""
    words = philox([torch.tensor([word]) for word in counter], key)
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def places(count):
    samples = torch.tensor([[7, 0]] * count, dtype=torch.int32)
    return samples, torch.arange(count, dtype=torch.int32)


def test_the_noise_of_a_part_of_the_vocabulary_is_that_part_of_the_noise():
    samples, at = places(5)
    whole = gumbel(3, samples, at, 0, VOCAB)
    for first, count in ((0, 128), (128, 128), (256, 45), (3, 7), (10, 1)):
        assert torch.equal(gumbel(3, samples, at, first, count), whole[:, first : first + count])
    assert torch.equal(gumbel(3, samples[2:], at[2:], 0, VOCAB), whole[2:])


def test_the_noise_depends_on_seed_sample_and_position():
    samples, at = places(3)
    noise = gumbel(3, samples, at, 0, VOCAB)
    assert (noise[0] - noise[1]).abs().min() >= 0 and not torch.equal(noise[0], noise[1])
    changed = samples.clone()
    changed[:, 1] = 1  # the high word: sample 7 + 2**32
    for other in (gumbel(4, samples, at, 0, VOCAB), gumbel(3, changed, at, 0, VOCAB)):
        assert not torch.equal(noise, other)
    assert not torch.equal(noise, gumbel(3 + (1 << 40), samples, at, 0, VOCAB))
    negative = torch.tensor([[-1, 0]], dtype=torch.int32)  # sample 2**32 - 1
    assert gumbel(3, negative, at[:1], 0, VOCAB).isfinite().all()


def words_of(parallel=None):
    embedding = VocabParallelEmbedding(build(ModelConfig, SIZES), parallel or TensorParallel())
    return embedding


def test_draws_have_the_distribution_of_the_softmax():
    count = 20_000
    logits = torch.linspace(-1.0, 1.5, VOCAB).repeat(count, 1)
    drawn = draw(logits, 5, *places(count), words_of())
    expected = count * logits[0].softmax(-1).double().numpy()
    counts = np.bincount(drawn.numpy(), minlength=VOCAB)
    assert chi_square(counts, expected) < chi_square_limit(VOCAB - 1)


def test_padding_of_the_vocabulary_is_never_drawn():
    logits = torch.zeros(50, 384)
    logits[:, VOCAB:] = 100.0
    assert draw(logits, 5, *places(50), words_of()).max() < VOCAB


def drawn_by_shards(context, logits):
    parallel = TensorParallel(context.tp)
    words = words_of(parallel)
    rows = words.weight.shape[0]
    part = logits[:, words.first : words.first + rows]
    part = torch.nn.functional.pad(part, (0, rows - part.shape[1]), value=50.0)
    return draw(part, 5, *places(len(logits)), words)


@pytest.mark.parametrize("ranks", [2, 4])  # of four the last holds nothing but padding
def test_every_split_of_the_vocabulary_draws_the_same(ranks):
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    whole = draw(torch.nn.functional.pad(logits, (0, 83)), 5, *places(200), words_of())
    for found in run_ranks(
        drawn_by_shards, ranks, logits, parallel=ParallelConfig(tensor_parallel_size=ranks)
    ):
        assert torch.equal(found, whole)
    assert (whole == logits.argmax(-1)).float().mean() < 0.9
