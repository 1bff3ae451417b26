"""Each fused kernel compared with torch's operators in fp64, in the order of a step: the first that differs is named.

    python benchmarks/kernels.py                                      # on a GPU: also times
    TRITON_INTERPRET=1 python benchmarks/kernels.py --device cpu      # in Triton's interpreter, on few tokens

On a GPU it also compares each implementation of attention that is installed.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.nn.functional as F

from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.setting_files import one_line
from megatron_lite.config.attention import IMPLEMENTATIONS, Capability
from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.layout import make_layout, may_see
from megatron_lite.transformer.attention_backends.varlen import VarlenLaunch
from megatron_lite.transformer.kernels import cross_entropy, fused, rule_attention
from megatron_lite.transformer.kernels import qkv_heads as heads
from megatron_lite.transformer.kernels.dropout import (
    FeatureDropout,
    drop,
    hash_pairs,
    is_kept,
    salts,
    token_keys,
)
from megatron_lite.transformer.kernels.varlen_kernels import use_attention, varlen_kernel

TOLERANCE = 2.0**-7  # of the largest number: results are rounded to bf16 once, and so are torch's inputs
EPSILON, P = 1e-5, 0.1
HEAD_SIZE, MASKED = 64, 512  # features; tokens of attention under the rule, whose reference holds all pairs


@dataclass
class Comparison:
    """A kernel compared with torch. Times are in microseconds, None where none was measured."""

    name: str
    difference: float  # the largest, relative to the largest number
    measured_us: float | None = None

    @property
    def differs(self) -> bool:
        return not self.difference <= TOLERANCE  # a NaN differs


@dataclass(frozen=True)
class Case:
    """A kernel's operator, and what torch makes of the same."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def cases(device: torch.device, tokens: int, width: int, words: int) -> Iterator[Case]:
    """In the order of a step."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, hidden, grad, grad_total = (draw(tokens, width) for _ in range(4))
    x_bias, weight, bias = (draw(width) for _ in range(3))
    keys = torch.from_numpy(token_keys(3, np.arange(1), tokens)[0].copy()).to(device)
    salt = int(salts(3)[1, 2])
    dropout = FeatureDropout(keys, salt, P)

    def summed() -> torch.Tensor:
        return drop(x.double() + x_bias.double(), hidden.double(), dropout)

    for form, centered, shift in (("", True, bias), (" rms", False, None)):

        def normed(total: torch.Tensor, centered: bool = centered) -> torch.Tensor:
            if centered:
                return F.layer_norm(total, (width,), weight.double(), bias.double(), EPSILON)
            return F.rms_norm(total, (width,), weight.double(), EPSILON)

        forward = (x, x_bias, keys, salt, P, hidden, weight, shift, EPSILON, centered)
        total, _, stats = fused.add_norm_kernel(*forward)
        yield Case(
            f"add_norm{form}", lambda forward=forward: fused.add_norm_kernel(*forward)[:2],
            lambda normed=normed, total=total: (summed(), normed(total.double())),
        )  # fmt: skip

        def norm_gradients(total: torch.Tensor = total, normed: Any = normed) -> tuple[torch.Tensor, ...]:
            start = total.double().requires_grad_()
            (d_hidden,) = torch.autograd.grad(normed(start), start, grad.double())
            d_hidden = d_hidden + grad_total.double()
            return d_hidden, drop(d_hidden, torch.zeros_like(d_hidden), dropout)

        backward = (grad_total, grad, total, weight, stats, centered, centered, keys, salt, P, True)
        yield Case(
            f"add_norm_backward{form}",
            lambda backward=backward: fused.add_norm_backward_kernel(*backward)[:2], norm_gradients,
        )  # fmt: skip
    sums = draw(min(512, tokens), 3 * width, dtype=torch.float32)
    yield Case("finish_sums", lambda: (fused.finish_sums_kernel([sums], x),), lambda: (sums.double().sum(0),))

    inner_grad, dropped = draw(tokens, 4 * width), (keys, salt, P)
    for kind, gated in itertools.product(ACTIVATIONS, (False, True)):
        inner, inner_bias = (draw(*rows, (1 + gated) * 4 * width) for rows in ((tokens,), ()))

        def activated(
            kind: str = kind,
            gated: bool = gated,
            inner: torch.Tensor = inner,
            inner_bias: torch.Tensor = inner_bias,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            start = (inner.double() + inner_bias.double()).requires_grad_()
            out = fused.activated_by_torch(start, kind, gated=gated, dropout=dropout)
            return out.detach(), torch.autograd.grad(out, start, inner_grad.double())[0]

        given, form = (inner, inner_bias), (kind, gated, *dropped)
        name = kind + " gated" * gated
        yield Case(
            f"activate {name}", lambda given=given, form=form: (fused.activate_kernel(*given, *form),),
            lambda activated=activated: activated()[:1],
        )  # fmt: skip
        yield Case(
            f"activate_backward {name}",
            lambda given=given, form=form: fused.activate_backward_kernel(*given, inner_grad, *form)[:1],
            lambda activated=activated: activated()[1:],
        )

    first, each = tokens // 2, width // HEAD_SIZE
    parts = [draw(count, each, HEAD_SIZE) for count in (first, first, first, tokens - first, tokens, tokens)]
    place = torch.arange(tokens, dtype=torch.int32, device=device)

    def joined() -> tuple[torch.Tensor, ...]:
        dq_0, dk_0, dv_0, dq_1, dk_1, dv_1 = (part.double() for part in parts)
        pairs = ((dk_0, dk_1), (dv_0, dv_1))
        of_keys = [torch.cat([slice_ + rest[:first], rest[first:]]) for slice_, rest in pairs]
        return (torch.stack([torch.cat([dq_0, dq_1]), *of_keys], dim=1),)

    yield Case("join_pair", lambda: fused.join_pair_kernel(*parts, 0, place, None)[:1], joined)
    yield from of_heads(draw, tokens, width // HEAD_SIZE)
    yield from masked_attention(
        draw, keys[:MASKED], torch.tensor(salt, dtype=torch.int32, device=device), each
    )

    logits, row_grad = draw(tokens, words), draw(tokens, dtype=torch.float32)
    targets = torch.arange(tokens, dtype=torch.int32, device=device) % words
    log_sums = torch.logsumexp(logits.float(), 1)

    def gradient() -> tuple[torch.Tensor, ...]:
        chosen = F.one_hot(targets.long(), words).double()
        return ((logits.double().softmax(1) - chosen) * row_grad.double()[:, None],)

    def written() -> tuple[torch.Tensor, ...]:
        copy = logits.clone()
        cross_entropy.write_gradient_kernel(copy, targets, log_sums, row_grad, 0, words)
        return (copy,)

    picked = targets.long()[:, None]
    yield Case(
        "log_sums", lambda: cross_entropy.log_sums_kernel(logits, targets, 0, words),
        lambda: (torch.logsumexp(logits.double(), 1), logits.double().gather(1, picked)[:, 0]),
    )  # fmt: skip
    yield Case("write_gradient", written, gradient)


def of_heads(draw: Callable[..., torch.Tensor], tokens: int, count: int) -> Iterator[Case]:
    """Kernels between the product of queries, keys and values and their scores: of all features of each head."""
    joined, grads = draw(tokens, 3 * count, HEAD_SIZE), [draw(tokens, count, HEAD_SIZE) for _ in range(3)]
    angles = draw(tokens, 1, HEAD_SIZE // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    turn = torch.complex(cos.double(), sin.double())
    for form, scales in (("", [None, None]), (" normed", [draw(HEAD_SIZE) for _ in range(2)])):

        def defined(start: torch.Tensor, scales: Any = scales) -> torch.Tensor:
            *parts, values = start.split(count, 1)
            for i, scale in enumerate(scales):
                if scale is not None:
                    parts[i] = F.rms_norm(parts[i], (HEAD_SIZE,), scale.double(), EPSILON)
            pairs = torch.view_as_complex(torch.stack(parts, 1).unflatten(-1, (-1, 2)).contiguous())
            turned = torch.view_as_real(pairs * turn[:, None]).flatten(-2)
            return torch.cat([turned, values[:, None]], 1)

        def gradient(defined: Callable[..., torch.Tensor] = defined) -> tuple[torch.Tensor, ...]:
            start = joined.double().requires_grad_()
            return torch.autograd.grad(defined(start), start, torch.stack(grads, 1).double())

        given = cos, sin, *scales, EPSILON, count, 1.0
        yield Case(
            f"expand_heads{form}", lambda given=given: (heads.expand_heads_kernel(joined, *given),),
            lambda defined=defined: (defined(joined.double()),),
        )  # fmt: skip
        yield Case(
            f"gather_heads{form}",
            lambda given=given: heads.gather_heads_kernel(*grads, 0, joined, *given, tokens)[:1], gradient,
        )  # fmt: skip
        if not form:

            def turned() -> tuple[torch.Tensor, ...]:
                copy = joined.view(tokens, 3, count, HEAD_SIZE).clone()
                heads.rotate_heads_kernel(copy, cos, sin, False)
                return (copy,)

            yield Case("rotate_heads", turned, lambda defined=defined: (defined(joined.double()),))


def masked_attention(
    draw: Callable[..., torch.Tensor], keys: torch.Tensor, salt: torch.Tensor, heads: int
) -> Iterator[Case]:
    """Kernels that evaluate the rule, with all that they can have, on one document: half of it is written."""
    tokens, device = len(keys), keys.device
    number = np.arange(tokens)[None]
    layout = make_layout(0 * number, (number - tokens // 2).clip(0), number // 5 % 3, number)
    plan = BlockPlan(layout, tokens, window=tokens // 2)
    plan.on_device([torch.from_numpy(array).to(device) for array in plan.arrays()], device)
    dtype = (
        torch.float16 if device.type == "cpu" else torch.bfloat16
    )  # Triton's interpreter multiplies no bf16
    qkv, grad = draw(tokens, 3, heads, HEAD_SIZE, dtype=dtype), draw(tokens, heads, HEAD_SIZE, dtype=dtype)
    distance = plan.columns[4][None] - plan.columns[4][:, None] + tokens
    line = torch.arange(2 * tokens + 1, device=device)
    numbers, rest = draw(32, heads, dtype=torch.float32), (keys, salt, P, 1, plan.window)
    tables = [draw(heads, tokens, tokens, dtype=dtype) for _ in range(2)]
    buckets, rows = (line * 32 // (2 * tokens + 1)).int(), (line - tokens // 2).clamp(0, tokens - 1)

    def added(
        form: str, numbers: torch.Tensor, of_queries: torch.Tensor, of_keys: torch.Tensor
    ) -> torch.Tensor:
        if not form:
            return numbers[buckets[distance].long()].movedim(2, 0)
        place = rows[distance].expand_as(of_queries)
        of_keys = of_keys.mT.gather(1, place) if form == " tables" else 0 * of_keys
        return (of_queries.gather(2, place) + of_keys) * HEAD_SIZE**-0.5

    def reference(form: str) -> list[torch.Tensor]:
        """Output, log of the sums, gradients of queries, keys and values, and of the bias."""
        start, *biases = (x.double().requires_grad_() for x in (qkv, numbers, *tables))
        query, key, value = start.permute(1, 2, 0, 3)  # [H, T, D]
        scores = query @ key.mT * HEAD_SIZE**-0.5 + added(form, *biases)
        seen = may_see(plan.columns[..., None], plan.columns[:, None], window=plan.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        of_heads = torch.arange(1, heads + 1, dtype=torch.int32, device=device)[:, None, None]
        kept = is_kept(hash_pairs(keys[:, None], keys[None], salt, of_heads), P)
        out = ((scores.softmax(-1) * kept / (1 - P)) @ value).transpose(0, 1)
        given = start, *{"": biases[:1], " tables": biases[1:], " query_tables": biases[1:2]}[form]
        return [out, scores.logsumexp(-1), *torch.autograd.grad(out, given, grad.double())]

    by_distance = numbers[buckets.long()].T.contiguous(), buckets, []
    by_tables = None, rule_attention.table_slots(rows), tables
    of_queries = *by_tables[:2], tables[:1]
    for form, bias in (("", by_distance), (" tables", by_tables), (" query_tables", of_queries)):
        yield from _attention_passes(form, reference(form), qkv, grad, plan, (*bias, *rest))


def _attention_passes(
    form: str, expected: list[torch.Tensor], qkv: torch.Tensor, grad: torch.Tensor, plan: BlockPlan, rest: Any
) -> Iterator[Case]:
    """Args: form: of the bias. expected: what the reference gives. rest: bias, dropout and window."""
    d_tables = [torch.zeros_like(table) for table in rest[2]]

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return rule_attention.rule_attention_kernel(qkv, plan.columns, plan.query_lists, *rest)

    out, log_sums = forward()

    def of_queries() -> tuple[torch.Tensor, torch.Tensor]:
        d_tables[:1] = [torch.zeros_like(table) for table in d_tables[:1]]
        given = d_tables, grad, qkv, out, log_sums, plan.columns, plan.query_lists, *rest
        return rule_attention.rule_attention_queries_kernel(*given)

    d_qkv, products = of_queries()

    def of_keys() -> tuple[torch.Tensor, torch.Tensor]:
        d_tables[1:] = [torch.zeros_like(table) for table in d_tables[1:]]
        given = d_qkv, d_tables, grad, qkv, log_sums, products, plan.columns, plan.key_lists, *rest
        sums = rule_attention.rule_attention_keys_kernel(*given)
        return d_qkv[:, 1:], *(d_tables[1:] if d_tables else [sums.sum(0).T])

    yield Case(f"rule_attention{form}", forward, lambda: expected[:2])
    yield Case(
        f"rule_attention_queries{form}", lambda: (of_queries()[0][:, 0], *d_tables[:1]),
        lambda: (expected[2][:, 0], *expected[3:3 + bool(form)]),
    )  # fmt: skip
    of_bias = expected[3 + bool(form) :]
    yield Case(f"rule_attention_keys{form}", of_keys, lambda: (expected[2][:, 1:], *of_bias))


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of any result, relative to its largest number."""
    found = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        gap = (mine.double() - other).abs().max() / other.abs().max().clamp(min=1.0)
        found = max(found, gap.item()) if gap == gap else float("nan")
    return found


def micros(run: Callable[[], Any], times: int = 20) -> float:
    """Median microseconds of the device, from memory: a cache would hold what a step has long displaced.

    The device is kept busy while the host launches, so that the host's time does not count.
    """
    found, more_than_cache = [], torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(times):
        for _ in range(4):
            more_than_cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return sorted(found)[times // 2]


def bisect(device: torch.device, tokens: int, width: int, words: int) -> list[Comparison]:
    """Every kernel, in the order of a step, up to the first that differs."""
    found = []
    for case in cases(device, tokens, width, words):
        one = Comparison(case.name, difference(case.ours(), case.theirs()))
        found.append(one)
        if one.differs:
            break
        if device.type == "cuda":
            one.measured_us = micros(case.ours)
    return found


DOCUMENT = 512  # tokens


def implementations(capability: Capability) -> list[str]:
    """The implementations of attention that this machine has."""
    return [name for name, each in IMPLEMENTATIONS.items() if each.runs_on(capability) and each.is_here]


def attention_launch(documents: int, length: int, device: torch.device) -> VarlenLaunch:
    """Documents of equal length, whose tokens see all of their own."""
    ends = torch.arange(documents + 1, dtype=torch.int32, device=device) * length
    whole, none = slice(0, documents * length), ends[:0]
    return VarlenLaunch(False, whole, whole, none, none, ends, ends, length, length)


def bisect_attention(names: list[str], device: torch.device, tokens: int, width: int) -> Iterator[Comparison]:
    """Both directions of each implementation, without dropout; a package that does not work differs."""
    length, heads = min(DOCUMENT, tokens), width // HEAD_SIZE
    launch = attention_launch(tokens // length, length, device)
    generator = torch.Generator().manual_seed(2)
    shape = (launch.queries.stop, heads, HEAD_SIZE)
    drawn = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(4)]
    wide = [x.double().view(-1, length, heads, HEAD_SIZE).transpose(1, 2).requires_grad_() for x in drawn]
    *inputs, grad = wide
    expected_out = F.scaled_dot_product_attention(*inputs)
    gradients = torch.autograd.grad(expected_out, inputs, grad)
    theirs = [x.transpose(1, 2).reshape(shape) for x in (expected_out, *gradients)]
    for name in names:
        each = [
            Comparison(f"{kernel} {name}", float("nan")) for kernel in ("attention", "attention_backward")
        ]
        try:
            measure_attention(name, drawn, launch, theirs, each)
        except (ConfigError, RuntimeError) as error:  # the package's
            print(f"attention {name}: {one_line(error)}", file=sys.stderr)
        yield from each
    use_attention("fa2")


def measure_attention(
    name: str,
    drawn: list[torch.Tensor],
    launch: VarlenLaunch,
    theirs: list[torch.Tensor],
    found: list[Comparison],
) -> None:
    """Fill in the differences of an implementation's two directions, and their times where there is a GPU."""
    *inputs, grad = drawn
    use_attention(name)
    kernel = varlen_kernel(grad.dtype)
    out, state = kernel.forward(*inputs, launch, 0.0)

    def backward() -> Any:
        return kernel.backward(grad, *inputs, out, state, launch, 0.0)

    found[0].difference, found[1].difference = (
        difference([out], theirs[:1]),
        difference(backward(), theirs[1:]),
    )
    if grad.device.type == "cuda":
        found[0].measured_us = micros(lambda: kernel.forward(*inputs, launch, 0.0))
        found[1].measured_us = micros(backward)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and torch sees no GPU; set --device cpu and TRITON_INTERPRET=1.")
    on_gpu = options.device == "cuda"
    if not on_gpu:
        fused.DEVICES = ("cuda", "cpu")
    sizes = (8640, 1024, 30592) if on_gpu else (11, 128, 300)
    device = torch.device(options.device)
    found = bisect(device, *sizes)
    if on_gpu:
        names = implementations(torch.cuda.get_device_capability())
        found += bisect_attention(names, device, *sizes[:2])
    print(f"{'kernel':36}{'difference':>12}{'microseconds':>14}")
    for one in found:
        measured = "-" if one.measured_us is None else f"{one.measured_us:.1f}"
        print(f"{one.name:36}{one.difference:12.1e}{measured:>14}")
    first = next((one.name for one in found if one.differs), None)
    print(f"first that differs: {first or 'none'}")
    answer: dict[str, Any] = {"first": first, "kernels": [asdict(one) for one in found]}
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1), encoding="utf-8")
    if first is not None:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
