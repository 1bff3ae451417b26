"""Dropout as a pure function of (step, sample, position, layer, place, feature).

Each token has a key, an int32 made of the step's seed, its sample's number and its position in the sample's row. Each
place where a layer drops has a salt. Whether an element stays is a hash of the two and of its index:

    hidden states            hash(key, salt, feature)
    attention weights        hash(key of the query, key of the key, salt, head)

So a token drops the same in every layout (data, tensor, sequence and pipeline parallelism, any micro-batch size), in
any order of tokens, in any batch, and when a block is computed again. The exception are the fused attention kernels of
CUDA (varlen.py), which draw their own numbers; they are seeded from (step, layer, rank).

The hash is exact integer arithmetic: the same bits on every device. On CPU numba computes the mask, on a GPU the kernel
that needs it (triton_kernels.py).
Hash: "lowbias32" of C. Wellons, nullprogram.com/blog/2018/07/31.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

PLACES = ("embedding", "attention", "attended", "expanded", "activated", "final")
_FIRST_PLACES = 4  # those of the first version: the numbers of their salts do not depend on the others

# 2^32 / golden ratio: neighbouring features become distant inputs of the hash.
_GOLDEN = np.uint32(0x9E3779B9)
_HEAD = np.uint32(0x85EBCA6B)
_FIRST, _SECOND = np.uint32(0x21F0AAAD), np.uint32(0x735A2D97)  # the hash's multipliers
# The int32 with the same bits, for torch.
_SIGNED_GOLDEN, _SIGNED_HEAD, *_SIGNED_MULTIPLIERS = (
    int(x.view(np.int32)) for x in (_GOLDEN, _HEAD, _FIRST, _SECOND)
)
_GOLDEN_64 = 0x9E3779B97F4A7C15
_MULTIPLIERS_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mix_64(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, uint64 -> uint64."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS_64, strict=True):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return x ^ (x >> np.uint64(31))


def token_keys(seed: int, samples: np.ndarray, length: int) -> np.ndarray:
    """The keys of a batch's tokens, int32 [B, length].

    Args: seed: of the step. samples: int64 [B], the number of each row's sample.
    """
    # The row first, then its positions: two mixes, so that neighbouring samples and positions have unrelated keys.
    rows = _mix_64(np.uint64(seed & (2**64 - 1)) ^ (samples.astype(np.uint64) * np.uint64(_GOLDEN_64)))
    keys = _mix_64(rows[:, None] + np.arange(length, dtype=np.uint64))
    return (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)


@functools.cache
def salts(layers: int) -> np.ndarray:
    """The salt of each place, int32 [layers + 1, len(PLACES)]; the last row is that of the embedding."""
    # Salts of the first places keep their numbers when places are added: the masks of existing runs stay what they are.
    first = np.arange((layers + 1) * _FIRST_PLACES, dtype=np.uint64).reshape(-1, _FIRST_PLACES)
    others = np.arange((layers + 1) * (len(PLACES) - _FIRST_PLACES), dtype=np.uint64).reshape(layers + 1, -1)
    numbers = np.concatenate([first, others + np.uint64(1 << 32)], axis=1)
    return (_mix_64(numbers + np.uint64(_GOLDEN_64)) >> np.uint64(32)).astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class Dropout:
    """Random keys from which layers compute the dropped elements of a micro-batch."""

    keys: torch.Tensor  # int32 [T]
    salts: torch.Tensor  # int32 [layers + 1, len(PLACES)]
    seed: int  # of kernels that draw their own numbers: differs per step and rank, not per layer
    first_head: int = 0  # number of this rank's first head
    step: int = 0  # an int32 of the step alone

    def distances(self, p: float, distances: torch.Tensor, layer: int = -1) -> FeatureDropout | None:
        """Dropout of the features of distances [n], int32; None if nothing is dropped. Args: layer: -1 for all layers.

        It is the same for all samples of a step: otherwise each would need its own table and product in each layer.
        """
        if not p:
            return None
        # The keys of distances are no token's: the salt is free.
        salt = int(salts(len(self.salts) - 1)[layer, PLACES.index("attention")])
        return FeatureDropout(hashed(distances * _SIGNED_GOLDEN ^ self.step), salt, p)

    def attention(self, p: float, layer: int) -> AttentionDropout:
        return AttentionDropout(self, p, layer)

    def features(self, p: float, layer: int, place: str) -> FeatureDropout | None:
        """None if nothing is dropped. Args: layer: -1 for the embedding. place: of PLACES."""
        if not p:
            return None
        # Read on the host: a number of the device would need a launch of its own, and a kernel takes it as an argument.
        return FeatureDropout(self.keys, int(salts(len(self.salts) - 1)[layer, PLACES.index(place)]), p)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of one layer's attention weights, with probability p."""

    parent: Dropout
    p: float
    layer: int

    @property
    def keys(self) -> torch.Tensor:
        return self.parent.keys

    @property
    def salt(self) -> torch.Tensor:
        return self.parent.salts[self.layer, PLACES.index("attention")]

    @property
    def first_head(self) -> int:
        return self.parent.first_head

    def seed_kernel(self, device: torch.device) -> None:
        """Seed the generator from which CUDA's attention kernels draw."""
        index = torch.cuda.current_device() if device.index is None else device.index
        # Not torch.manual_seed: it takes 100 times as long, and seeds every visible device.
        torch.cuda.default_generators[index].manual_seed((self.parent.seed + self.layer) & (2**63 - 1))

    def keep(self, queries: torch.Tensor, keys: torch.Tensor, heads: int) -> torch.Tensor:
        """True where a weight stays, bool [heads, Q, K], for int32 token keys [Q] and [K]; on CPU."""
        kept = np.empty((heads, len(queries), len(keys)), np.bool_)
        threshold = np.uint32(threshold_of(self.p))
        _keep_pairs(_bits(queries), _bits(keys), _bits(self.salt)[()], self.first_head, threshold, kept)
        return torch.from_numpy(kept)


class FeatureDropout(NamedTuple):
    """Dropout of hidden states at one place, with probability p."""

    keys: torch.Tensor  # int32 [T]
    salt: int  # an int32
    p: float

    def of_rows(self, rows: torch.Tensor) -> FeatureDropout:
        """The same of some of the tokens. Args: rows: int [K]."""
        return FeatureDropout(self.keys.index_select(0, rows), self.salt, self.p)

    def from_feature(self, first: int) -> FeatureDropout:
        """The same of hidden states of which this rank holds the features from `first` on."""
        if not first:
            return self
        # Moves the hash's input to the rank's first feature: a split MLP drops what the whole one does.
        step = int((np.uint64(first) * np.uint64(_GOLDEN)).astype(np.uint32).view(np.int32))
        return FeatureDropout((self.keys ^ self.salt) + step, 0, self.p)


def drop(x: torch.Tensor, residual: torch.Tensor | None, dropout: FeatureDropout | None) -> torch.Tensor:
    """`residual` plus x [T, D] with elements dropped with probability p and the others divided by 1 - p, by torch."""
    if dropout is None:
        return x if residual is None else residual + x
    mask = keep_features(dropout.keys, dropout.salt, x.shape[1], dropout.p)
    return _Drop.apply(x, residual, mask, 1.0 / (1.0 - dropout.p))


class _Drop(torch.autograd.Function):
    """residual + x where it stays, times `scale`: one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x, residual, stays, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(stays)
        ctx.scale = scale
        if residual is None:
            # x * mask * scale in one kernel; the name is that of its other use.
            return torch.ops.aten.native_dropout_backward(x, stays, scale)
        return torch.addcmul(residual, x, stays, value=scale)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        (stays,) = ctx.saved_tensors
        of_residual = grad if ctx.needs_input_grad[1] else None
        return torch.ops.aten.native_dropout_backward(grad, stays, ctx.scale), of_residual, None, None


def threshold_of(p: float) -> int:
    """An element stays if its hash, uint32, is not below this."""
    return round(p * 2**32)


def _bits(x: torch.Tensor) -> np.ndarray:
    """An int32 tensor of the CPU as uint32."""
    return x.numpy().view(np.uint32)


def hashed(x: torch.Tensor) -> torch.Tensor:
    """The hash on int32 tensors, whose bits are those of the uint32 result."""
    for shift, multiplier in zip((16, 15), _SIGNED_MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * multiplier
    return x ^ _shifted(x, 15)


def stays(hashes: torch.Tensor, p: float) -> torch.Tensor:
    """True for int32 `hashes` that are, as uint32, not below the threshold of p."""
    # Flipping the sign bit maps the order of uint32 to that of int32, which is all that torch compares.
    return (hashes ^ -(2**31)) >= threshold_of(p) - 2**31


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x >> by, as uint32."""
    # torch shifts signed numbers arithmetically: the sign's copies are masked off.
    return (x >> by) & ((1 << (32 - by)) - 1)


def pairs_formula(
    queries: torch.Tensor, keys: torch.Tensor, salt: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """The hash of attention weights, for int32 tensors that broadcast; heads are global numbers."""
    return hashed((queries ^ salt) + keys * _SIGNED_GOLDEN + heads * _SIGNED_HEAD)


def features_formula(keys: torch.Tensor, salt: int, width: int) -> torch.Tensor:
    """The hash of features, int32 [T, width], by torch's operators: several passes, for `training.kernels=torch`."""
    features = torch.arange(width, dtype=torch.int32, device=keys.device)
    return hashed((keys ^ salt)[:, None] + features * _SIGNED_GOLDEN)


def keep_features(keys: torch.Tensor, salt: int, width: int, p: float) -> torch.Tensor:
    """True where a feature stays, bool [T, width], for int32 keys [T] and an int32 salt."""
    if keys.device.type != "cpu":
        return stays(features_formula(keys, salt, width), p)
    kept = np.empty((len(keys), width), np.bool_)
    _keep_features(_bits(keys), np.int32(salt).view(np.uint32), np.uint32(threshold_of(p)), kept)
    return torch.from_numpy(kept)


@njit(nogil=True, inline="always")
def _hash(z):  # type: ignore[no-untyped-def]
    z = np.uint32((z ^ (z >> np.uint32(16))) * _FIRST)
    z = np.uint32((z ^ (z >> np.uint32(15))) * _SECOND)
    return np.uint32(z ^ (z >> np.uint32(15)))


@njit(nogil=True, cache=True)
def _keep_features(keys, salt, threshold, kept):  # type: ignore[no-untyped-def]
    for token in range(kept.shape[0]):
        start = np.uint32(keys[token] ^ salt)
        for feature in range(kept.shape[1]):
            step = np.uint32(np.uint32(feature) * _GOLDEN)
            kept[token, feature] = _hash(np.uint32(start + step)) >= threshold


@njit(nogil=True, cache=True)
def _keep_pairs(queries, keys, salt, first_head, threshold, kept):  # type: ignore[no-untyped-def]
    for head in range(kept.shape[0]):
        of_head = np.uint32(np.uint32(head + first_head) * _HEAD)
        for query in range(kept.shape[1]):
            start = np.uint32(np.uint32(queries[query] ^ salt) + of_head)
            for key in range(kept.shape[2]):
                step = np.uint32(keys[key] * _GOLDEN)
                kept[head, query, key] = _hash(np.uint32(start + step)) >= threshold
