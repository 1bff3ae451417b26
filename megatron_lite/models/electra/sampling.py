"""Draws from the generator's predictions: a pure function of (seed, sample, position in its sequence).

The token is argmax_v(logit_v - ln(-ln u_v)), which has the distribution softmax(logits) (Gumbel-max). u_v is a number
of Philox at the counter (v, position, sample), so that a shard of the vocabulary needs no other shard's numbers, and
one maximum over the shards is the draw of the whole.

Source of Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.transformer.tensor_parallel import VocabParallelEmbedding

_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_LOW = 0xFFFFFFFF
_LANES = 4  # numbers of a counter
_CHUNK = 1 << 20  # numbers that are in memory at once


def philox(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Four words of 32 bits for each counter. Args: counter: four int64 tensors of such words, which broadcast."""
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        # Products of 32-bit words may exceed 2^63 and wrap as int64; the masks below keep the right bits all
        # the same.
        products = [word * multiplier for word, multiplier in zip((a, c), _MULTIPLIERS, strict=True)]
        (low_a, low_c), (high_a, high_c) = ([p & _LOW for p in products], [p >> 32 & _LOW for p in products])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + _WEYL[0] & _LOW, second + _WEYL[1] & _LOW
    return [a, b, c, d]


def gumbel(seed: int, samples: torch.Tensor, positions: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Gumbel noise of the tokens `first` to `first + count` at each position, fp32 [K, count].

    Args: samples: int32 [K, 2], the words of each sample's number. positions: int32 [K].
    """
    # A counter gives 4 numbers, so a shard that begins within one computes it whole and leaves out the first
    # ones.
    start = first // _LANES
    blocks = torch.arange(start, -(-(first + count) // _LANES), device=positions.device)
    words = (samples.long() & _LOW)[:, :, None].unbind(1)
    numbers = philox(
        [blocks[None], positions.long()[:, None], *words], (seed & _LOW, seed >> 32 & _LOW)
    )  # [K, blocks] each
    whole = torch.stack(torch.broadcast_tensors(*numbers), dim=-1).flatten(1)
    # fp64 and + 0.5: u is never 0 or 1, whose logarithms are infinite.
    uniform = (whole[:, first - start * _LANES :][:, :count].double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


@torch.no_grad()
def draw(
    logits: torch.Tensor,
    seed: int,
    samples: torch.Tensor,
    positions: torch.Tensor,
    words: VocabParallelEmbedding,
) -> torch.Tensor:
    """A token for each masked position, int64 [K], equal on all tensor-parallel ranks.

    Args: logits: [K, local V with padding]. samples, positions: as for `gumbel`.
    """
    group, first, count = words.parallel.group, words.first, words.local_vocab
    most = torch.full((len(logits),), float("-inf"), device=logits.device)
    token = torch.full_like(most, words.vocab_size, dtype=torch.int64)
    # In parts: noise in fp64 for all positions and words would be larger than the logits.
    rows = max(1, _CHUNK // max(1, count))
    for start in range(0, len(logits) if count else 0, rows):
        part = slice(start, start + rows)
        scores = logits[part, :count].float() + gumbel(seed, samples[part], positions[part], first, count)
        best, index = scores.max(dim=1)
        most[part], token[part] = best, index + first
    if group.size > 1:
        # Of equal maxima the smallest token wins on every rank, so that all draw the same.
        own = most.clone()
        all_reduce(most, group, dist.ReduceOp.MAX)
        token = token.masked_fill(own != most, words.vocab_size)
        all_reduce(token, group, dist.ReduceOp.MIN)
    return token
