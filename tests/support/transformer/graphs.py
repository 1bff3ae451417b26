"""CUDA graphs on a CPU: every operation of a capture is repeated with the same numbers on the same memory."""

from __future__ import annotations

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.transformer import fused_block, residual
from megatron_lite.transformer import loss as lm_loss
from megatron_lite.transformer.attention_backends import varlen
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels import qkv_heads as kernels_of_heads
from megatron_lite.transformer.kernels.dropout import drop, hash_features, is_kept
from megatron_lite.transformer.kernels.varlen_kernels import VarlenKernel
from megatron_lite.transformer.rope import Rotary


class _Capture(TorchDispatchMode):
    """Notes operations with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.operations, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for a number"
        if func._schema.is_mutable:
            self.before += [(tensor, tensor.clone()) for tensor in tensors((args, kwargs))]
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def made(self):
        """Results that are memory of their own: each operation with (its result, the same again)."""
        for func, args, kwargs, out in self.operations:
            given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            own = [x.untyped_storage().data_ptr() not in given for x in tensors(out)]
            yield func, args, kwargs, [x for x, is_own in zip(tensors(out), own, strict=True) if is_own]


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel()]


def capture(run, pool=None):
    """As graphs.capture. Until it is replayed, results are not numbers, and what was there is as before."""
    with _Capture() as captured:
        results = run()
    for tensor, value in reversed(captured.before):
        tensor.copy_(value)
    operations = list(captured.made())
    for *_, own in operations:
        for tensor in own:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    @torch.no_grad()
    def replay():
        for func, args, kwargs, own in operations:
            if func.is_view:
                continue
            again = tensors(func(*args, **kwargs))
            if own:
                for tensor, value in zip(own, again, strict=True):
                    tensor.copy_(value)

    return replay, results


@torch.library.custom_op("tests::varlen_attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    causal: bool,
) -> torch.Tensor:  # fmt: skip
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    for queries, keys, weights in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, causal):
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v[keys])
    return out


@torch.library.custom_op("tests::varlen_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, causal: bool,
) -> list[torch.Tensor]:  # fmt: skip
    dq, dk, dv = (torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in (q, k, v))
    for queries, keys, weights in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, causal):
        given = grad[queries]
        dv[keys] = torch.einsum("hqk,qhd->khd", weights, given)
        of_weights = torch.einsum("qhd,khd->hqk", given, v[keys])
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        dq[queries] = torch.einsum("hqk,khd->qhd", of_scores, k[keys])
        dk[keys] = torch.einsum("hqk,qhd->khd", of_scores, q[queries])
    return [dq, dk, dv]


def _sequences(q, k, cu_seqlens_q, cu_seqlens_k, causal):
    """Queries, keys and weights of each sequence that has any."""
    ends = zip(
        itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
    )
    for queries, keys in (map(lambda span: slice(*span), pair) for pair in ends):
        if queries.stop > queries.start:
            scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) / q.shape[-1] ** 0.5
            if causal:
                hidden = torch.ones_like(scores[0], dtype=torch.bool)
                scores = scores.masked_fill(hidden.triu(hidden.shape[1] - hidden.shape[0] + 1), float("-inf"))
            yield queries, keys, scores.softmax(-1)


class Operators(VarlenKernel):
    """CUDA's attention kernels as operators; what is in no sequence is not a number."""

    @staticmethod
    def forward(q, k, v, call, dropout):
        return _attention(q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.causal), []

    @staticmethod
    def backward(grad, q, k, v, out, state, call, dropout):
        return tuple(_attention_backward(grad, q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, call.causal))


# The kernels of a block by torch's operators, which a capture sees one by one. Arguments and results as in fused.py.


FORMS = {"gelu_tanh": "tanh", "gelu_erf": "none"}


def _kept(x, keys, salt, p):
    return torch.where(is_kept(hash_features(keys, salt, x.shape[1]), p), x / (1.0 - p), 0.0) if p else x


def add_norm_kernel(x, x_bias, keys, salt, p, hidden, weight, bias, epsilon, centered):
    total = hidden if x is None else hidden + _kept(x if x_bias is None else x + x_bias, keys, salt, p)
    mean = total.mean(1, keepdim=True)
    deviation = ((total - mean) ** 2).mean(1, keepdim=True).add(epsilon).rsqrt()
    return (
        total.clone(),
        (total - mean) * deviation * weight + bias,
        torch.cat([deviation, mean], 1).T.contiguous(),
    )


def add_norm_backward_kernel(
    d_total, d_normed, total, weight, stats, has_bias, centered, keys, salt, p, has_x_bias
):
    normal = (total - stats[1, :, None]) * stats[0, :, None]
    weighted = d_normed * weight
    shared = normal * (weighted * normal).mean(1, keepdim=True) + weighted.mean(1, keepdim=True)
    d_hidden = d_total + (weighted - shared) * stats[0, :, None]
    d_x = _kept(d_hidden, keys, salt, p)
    sums = [d_normed * normal, d_normed, *([d_x] if has_x_bias else [])]
    return d_hidden, d_x, torch.cat(sums, 1).sum(0, keepdim=True)


def activate_kernel(x, bias, kind, gated, keys, salt, p):
    return torch.nn.functional.gelu(x + bias, approximate=FORMS[kind])


def activate_backward_kernel(x, bias, grad, kind, gated, keys, salt, p):
    d_x = torch.ops.aten.gelu_backward(grad, x + bias, approximate=FORMS[kind])
    return d_x, d_x.sum(0, keepdim=True)


def finish_sums_kernel(sums, like):
    return torch.cat([part.sum(0) for part in sums])


def join_pair_kernel(dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, first_key, place, second_start):
    tokens = torch.arange(len(place))[:, None, None]
    second = torch.where(tokens < second_start, dq_0, dq_1)
    gathered = [torch.where(place[:, None, None] < 0, 0.0, part[place.clamp(min=0)]) for part in (dk_1, dv_1)]
    of_keys = [torch.where(tokens < second_start, part, 0.0) for part in (dk_0, dv_0)]
    of_keys = [part + more for part, more in zip(of_keys, gathered, strict=True)]
    total = torch.stack([second, *of_keys], 1)
    return total, total.flatten(1).sum(0, keepdim=True)


def rotate_heads_kernel(heads, cos, sin, back):
    turning = heads[:, :2].flatten(1, 2)
    heads[:, :2].copy_(Rotary(cos, -sin if back else sin).rotate(turning).view_as(heads[:, :2]))


def by_torch(monkeypatch):
    """Let fused blocks run on a CPU without Triton's interpreter."""
    for name in ("add_norm", "add_norm_backward", "activate", "activate_backward", "finish_sums"):
        monkeypatch.setattr(fused_block, f"{name}_kernel", globals()[f"{name}_kernel"])
    for module in (fused_block, kernels_of_heads):
        monkeypatch.setattr(module, "rotate_heads_kernel", rotate_heads_kernel)
    monkeypatch.setattr(varlen, "join_pair_kernel", join_pair_kernel)
    monkeypatch.setattr(lm_loss, "has_kernels", lambda logits: False)
    monkeypatch.setattr(
        residual, "dropout_add", lambda x, hidden, dropout, bias: drop(x + bias, hidden, dropout)
    )
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(varlen, "varlen_kernel", lambda dtype: Operators)
