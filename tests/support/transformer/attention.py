"""Masks and inputs for tests of attention, and attention written out."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from support.data.recipes import collate, make, windows

from data_utils.common.batch_fields import DOC, GRP, ORD
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.kernels.dropout import Dropout, salts, token_keys
from megatron_lite.transformer.kernels.varlen_kernels import VarlenKernel

CPU = torch.device("cpu")


def arrays_of(batch):
    """doc, ord, grp of a batch."""
    return tuple(np.ascontiguousarray(batch[:, field]) for field in (DOC, ORD, GRP))


def recipe_arrays(recipe, sequence_length, rows, seed, fields=(DOC, ORD, GRP)):
    """doc, ord, grp of random packed and padded rows."""
    made = make(recipe.name, sequence_length, **recipe.config)
    batch = collate(made, windows(rows, sequence_length, seed))
    return tuple(np.ascontiguousarray(batch[:, field]) for field in fields)


def random_arrays(seed):
    """Arrays that no objective makes: documents in several stretches, any order, any groups, rows that see nothing."""
    rng = np.random.default_rng(seed)
    shape = (2, int(rng.integers(1, 40)))
    fields = rng.integers(-1, 3, shape), rng.integers(-5, 6, shape), rng.integers(0, 3, shape) * (seed % 2)
    return tuple(field.astype(np.int32) for field in fields)


def mask_of(arrays, window=0):
    return torch.from_numpy(allowed(*arrays, window=window))


def reference_attention(arrays, q, k, v, window=0):
    """Softmax over the allowed keys, written out; rows that see nothing give 0."""
    mask = mask_of(arrays, window)[:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def draw(shape, dtype=torch.float64, count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count)]


def attend(plan, qkv, dropout=None, device=CPU, layer=0):
    """What a plan of `plan_attention` computes for q, k, v [B, S, H, D], in the order of the batch; padding gives 0.

    Arguments and result are on the CPU.
    """
    order = torch.from_numpy(plan.order)
    real = order >= 0
    packed = torch.stack([x.flatten(0, 1) for x in qkv], dim=1)
    # Padding takes values that would be seen in the output.
    ordered = torch.where(real[:, None, None, None], packed[order.clamp(min=0)], 3.0)
    arrays = [torch.as_tensor(x).to(device) for x in plan.arrays()]  # tensors, if it was on the device before
    out = plan.on_device(arrays, device).attend(layer, [ordered.to(device)], dropout).cpu()
    whole = torch.zeros_like(packed[:, 0])
    return whole.index_copy(0, order[real], out[real]).view_as(qkv[0])


def dropout_of(arrays, p, seed=0, plan=None, heads_first=0, device=CPU):
    """Dropout of attention weights in layer 0, for tokens in the order of the plan, or of the batch."""
    keys = token_keys(seed, np.arange(len(arrays[0])), arrays[0].shape[1]).reshape(-1)
    if plan is not None:
        keys = keys[plan.order]
    on_device = (torch.from_numpy(x).to(device) for x in (keys, salts(1)))
    return Dropout(*on_device, seed, heads_first).attention(p, 0)


class EmulatedKernel(VarlenKernel):
    """Results of CUDA's kernels, written out, sequence by sequence; no dropout. What is in none is not a number."""

    calls = 0

    @classmethod
    def forward(cls, q, k, v, call, dropout):
        assert not dropout and len(q) >= call.cu_seqlens_q[-1] and len(k) >= call.cu_seqlens_k[-1]
        cls.calls += 1
        outs = [torch.full_like(q[: call.cu_seqlens_q[0]], torch.nan)]
        for (first, stop), (first_key, stop_key) in zip(
            itertools.pairwise(call.cu_seqlens_q.tolist()),
            itertools.pairwise(call.cu_seqlens_k.tolist()),
            strict=True,
        ):
            if stop == first == call.cu_seqlens_q[-1]:  # fills up the number of sequences
                continue
            assert 0 < stop - first <= call.max_seqlen_q and 0 < stop_key - first_key <= call.max_seqlen_k
            queries, keys, values = q[first:stop], k[first_key:stop_key], v[first_key:stop_key]
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / q.shape[-1] ** 0.5
            hidden, shift = torch.zeros(scores.shape[1:], dtype=torch.bool), len(keys) - len(queries)
            if call.causal:
                hidden |= torch.ones_like(hidden).triu(shift + 1)
            if call.window:
                hidden |= torch.ones_like(hidden).triu(shift + call.window + 1)
                hidden |= torch.ones_like(hidden).tril(shift - call.window - 1)
            scores = scores.masked_fill(hidden, float("-inf"))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat([*outs, torch.full_like(q[call.cu_seqlens_q[-1] :], torch.nan)]), [torch.zeros(1)]

    @classmethod
    def backward(cls, grad, q, k, v, out, state, call, dropout):
        queries, keys = (
            slice(int(ends[0]), int(ends[-1])) for ends in (call.cu_seqlens_q, call.cu_seqlens_k)
        )
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            again = cls.forward(*inputs, call, dropout)[0][queries]
        torch.testing.assert_close(again, out[queries])
        found = torch.autograd.grad(again, inputs, grad[queries])
        whole = [torch.full_like(gradient, torch.nan) for gradient in found]
        for to, gradient, rows in zip(whole, found, (queries, keys, keys), strict=True):
            to[rows] = gradient[rows]
        return whole
