"""Dropout as a pure function of (step, sample, position, layer, site, feature).

Each token has a key, an int32 made of the step's seed, its sample's number and its position in the sample's row. Each
site where a layer drops has a salt. A hash of the two and of an element's index says whether the element is kept:

    hidden states            hash(key, salt, feature)
    attention weights        hash(key of the query, key of the key, salt, head)

So a token drops the same elements in every layout (data, tensor, sequence and pipeline parallelism, any micro-batch
size), in any order of tokens, in any batch, and when a block is computed again. The exception are the fused attention
kernels of CUDA (varlen.py), which draw their own numbers; they are seeded from (step, layer, rank).

The hash is exact integer arithmetic: the same bits on every device. On CPU numba computes the mask, on a GPU the kernel
that needs it (triton_kernels.py).
Hash: "lowbias32" of C. Wellons, nullprogram.com/blog/2018/07/31.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from data_utils.common.compiler import njit

SITES = ("embedding", "attention", "attended", "expanded", "activated", "final")
_FIRST_SITES = 4  # of the first version: the numbers of their salts do not depend on the other sites

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

    Args: seed: of the step. samples: int64 [B], the number of the sample in each row of the batch.
    """
    # The sample first, then its positions: two mixes, so that neighbouring samples and positions have unrelated keys.
    sample_keys = _mix_64(np.uint64(seed & (2**64 - 1)) ^ (samples.astype(np.uint64) * np.uint64(_GOLDEN_64)))
    keys = _mix_64(sample_keys[:, None] + np.arange(length, dtype=np.uint64))
    return (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)


@functools.cache
def salts(layers: int) -> np.ndarray:
    """The salt of each site, int32 [layers + 1, len(SITES)]; the last row is the embedding's."""
    # Salts of the first sites keep their numbers when sites are added: the masks of existing runs do not change.
    first = np.arange((layers + 1) * _FIRST_SITES, dtype=np.uint64).reshape(-1, _FIRST_SITES)
    others = np.arange((layers + 1) * (len(SITES) - _FIRST_SITES), dtype=np.uint64).reshape(layers + 1, -1)
    numbers = np.concatenate([first, others + np.uint64(1 << 32)], axis=1)
    return (_mix_64(numbers + np.uint64(_GOLDEN_64)) >> np.uint64(32)).astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class Dropout:
    """Random keys from which layers compute the dropped elements of a micro-batch."""

    keys: torch.Tensor  # int32 [T]
    salts: torch.Tensor  # int32 [layers + 1, len(SITES)]
    seed: int  # of kernels that draw their own numbers: differs per step and rank, not per layer
    first_head: int = 0  # number of this rank's first head
    step: int = 0  # an int32 of the step alone

    def distances(self, p: float, distances: torch.Tensor, layer: int = -1) -> FeatureDropout | None:
        """Dropout of the features of distances [n], int32; None if nothing is dropped. Args: layer: -1 for all layers.

        It is the same for all samples of a step: otherwise each would need its own table and product in each layer.
        """
        if not p:
            return None
        # The keys of distances are no token's, so the salt of attention can serve them too.
        salt = int(salts(len(self.salts) - 1)[layer, SITES.index("attention")])
        return FeatureDropout(hashed(distances * _SIGNED_GOLDEN ^ self.step), salt, p)

    def attention(self, p: float, layer: int) -> AttentionDropout:
        return AttentionDropout(self, p, layer)

    def features(self, p: float, layer: int, site: str) -> FeatureDropout | None:
        """None if nothing is dropped. Args: layer: -1 for the embedding. site: of SITES."""
        if not p:
            return None
        # Read on the host: a kernel takes it as an argument, and reading a number of the device would need a launch.
        return FeatureDropout(self.keys, int(salts(len(self.salts) - 1)[layer, SITES.index(site)]), p)


class LayerDropout(NamedTuple):
    """Dropout at places of a layer that have names and no entry in SITES: the inputs of LoRA's updates."""

    parent: Dropout
    layer: int

    def named(self, p: float, name: str) -> FeatureDropout:
        return FeatureDropout(self.parent.keys, _salt_of(self.layer, name), p)


@functools.cache
def _salt_of(layer: int, name: str) -> int:
    # Beyond the numbers of `salts`, whose first 2^33 the sites have.
    number = np.array([(zlib.crc32(name.encode()) | 1 << 33) << 20 | layer], dtype=np.uint64)
    return int((_mix_64(number + np.uint64(_GOLDEN_64)) >> np.uint64(32)).astype(np.uint32).view(np.int32)[0])


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
        return self.parent.salts[self.layer, SITES.index("attention")]

    @property
    def first_head(self) -> int:
        return self.parent.first_head

    def seed_kernel(self, device: torch.device) -> None:
        """Seed the generator from which CUDA's attention kernels draw."""
        if device.type == "meta":  # nothing is drawn
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        # Not torch.manual_seed: it takes 100 times as long, and seeds every visible device.
        torch.cuda.default_generators[index].manual_seed((self.parent.seed + self.layer) & (2**63 - 1))

    def keep(self, queries: torch.Tensor, keys: torch.Tensor, heads: int) -> torch.Tensor:
        """True where a weight is kept, bool [heads, Q, K], for int32 token keys [Q] and [K]; on CPU."""
        keep = np.empty((heads, len(queries), len(keys)), np.bool_)
        threshold = np.uint32(keep_threshold(self.p))
        _keep_pairs(_bits(queries), _bits(keys), _bits(self.salt)[()], self.first_head, threshold, keep)
        return torch.from_numpy(keep)


class FeatureDropout(NamedTuple):
    """Dropout of hidden states at one site, with probability p."""

    keys: torch.Tensor  # int32 [T]
    salt: int  # an int32
    p: float

    def for_tokens(self, index: torch.Tensor) -> FeatureDropout:
        """The same for some of the tokens. Args: index: int [K]."""
        return FeatureDropout(self.keys.index_select(0, index), self.salt, self.p)

    def from_feature(self, first: int) -> FeatureDropout:
        """The same for hidden states of which this rank holds the features from `first` on."""
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
    """residual + x * keep * scale: one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x, residual, keep, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(keep)
        ctx.scale = scale
        if residual is None:
            # x * keep * scale in one kernel, which torch names after its use in a backward pass.
            return torch.ops.aten.native_dropout_backward(x, keep, scale)
        return torch.addcmul(residual, x, keep, value=scale)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        (keep,) = ctx.saved_tensors
        grad_residual = grad if ctx.needs_input_grad[1] else None
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.scale), grad_residual, None, None


def keep_threshold(p: float) -> int:
    """An element is kept if its hash, uint32, is not below this."""
    return round(p * 2**32)


def _bits(x: torch.Tensor) -> np.ndarray:
    """An int32 tensor of the CPU as uint32."""
    return x.numpy().view(np.uint32)


def hashed(x: torch.Tensor) -> torch.Tensor:
    """The hash on int32 tensors, whose bits are those of the uint32 result."""
    for shift, multiplier in zip((16, 15), _SIGNED_MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * multiplier
    return x ^ _shifted(x, 15)


def is_kept(hashes: torch.Tensor, p: float) -> torch.Tensor:
    """True for int32 `hashes` that are, as uint32, not below the threshold of p."""
    # Flipping the sign bit maps the order of uint32 to that of int32, which is all that torch compares.
    return (hashes ^ -(2**31)) >= keep_threshold(p) - 2**31


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x >> by, as uint32."""
    # torch shifts signed numbers arithmetically: the sign's copies are masked off.
    return (x >> by) & ((1 << (32 - by)) - 1)


def hash_pairs(
    queries: torch.Tensor, keys: torch.Tensor, salt: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """The hash of attention weights, for int32 tensors that broadcast; heads are global numbers."""
    return hashed((queries ^ salt) + keys * _SIGNED_GOLDEN + heads * _SIGNED_HEAD)


def hash_features(keys: torch.Tensor, salt: int, width: int) -> torch.Tensor:
    """The hash of features, int32 [T, width], by torch's operators: several passes, for `training.kernels=torch`."""
    features = torch.arange(width, dtype=torch.int32, device=keys.device)
    return hashed((keys ^ salt)[:, None] + features * _SIGNED_GOLDEN)


def keep_features(keys: torch.Tensor, salt: int, width: int, p: float) -> torch.Tensor:
    """True where a feature is kept, bool [T, width], for int32 keys [T] and an int32 salt."""
    if keys.device.type != "cpu":
        return is_kept(hash_features(keys, salt, width), p)
    keep = np.empty((len(keys), width), np.bool_)
    _keep_features(_bits(keys), np.int32(salt).view(np.uint32), np.uint32(keep_threshold(p)), keep)
    return torch.from_numpy(keep)


@njit(nogil=True, inline="always")
def _hash(z):  # type: ignore[no-untyped-def]
    z = np.uint32((z ^ (z >> np.uint32(16))) * _FIRST)
    z = np.uint32((z ^ (z >> np.uint32(15))) * _SECOND)
    return np.uint32(z ^ (z >> np.uint32(15)))


@njit(nogil=True, cache=True)
def _keep_features(keys, salt, threshold, keep):  # type: ignore[no-untyped-def]
    for token in range(keep.shape[0]):
        start = np.uint32(keys[token] ^ salt)
        for feature in range(keep.shape[1]):
            step = np.uint32(np.uint32(feature) * _GOLDEN)
            keep[token, feature] = _hash(np.uint32(start + step)) >= threshold


@njit(nogil=True, cache=True)
def _keep_pairs(queries, keys, salt, first_head, threshold, keep):  # type: ignore[no-untyped-def]
    for head in range(keep.shape[0]):
        head_term = np.uint32(np.uint32(head + first_head) * _HEAD)
        for query in range(keep.shape[1]):
            start = np.uint32(np.uint32(queries[query] ^ salt) + head_term)
            for key in range(keep.shape[2]):
                step = np.uint32(keys[key] * _GOLDEN)
                keep[head, query, key] = _hash(np.uint32(start + step)) >= threshold
