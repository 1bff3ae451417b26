"""The router of a mixture of experts: which experts compute a token, with which weights, and the losses of the choice.

The router sees the logits of all tokens of a micro-batch on every tensor-parallel rank, so that what follows from them
is equal there. Its losses are means over the tokens of each sequence, averaged over the sequences of the step: a
sequence is whole in one micro-batch on one rank, so they do not depend on the layout. Its counts, by which biases move,
are sums over all tokens of the step.

Shapes: T tokens, D hidden size, E experts, k of them for each token, B sequences.
Sources: GLM-4.5, arXiv:2508.06471; choice and losses: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; biases:
arXiv:2408.15664; z-loss: ST-MoE, arXiv:2202.08906.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.experts import ExpertsConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import Group, all_reduce, gather_tokens
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.routed_tokens import RoutedTokens
from megatron_lite.transformer.tensor_parallel import TensorParallel

# What a router sums over the tokens of a step beside the tokens of each expert, as means of each sequence.
MEASURES = ("balance_loss", "router_z_loss", "router_entropy")


class Choice(NamedTuple):
    """What the router says of each token."""

    experts: torch.Tensor  # int64 [T, k]
    gates: torch.Tensor  # fp32 [T, k]: weights of their outputs
    scores: torch.Tensor  # fp32 [T, E]: of all experts


def choose(logits: torch.Tensor, bias: torch.Tensor | None, settings: ExpertsConfig) -> Choice:
    """Args: logits: fp32 [T, E]. bias: fp32 [E], of the choice alone."""
    scores = logits.sigmoid() if settings.scores == "sigmoid" else logits.softmax(-1)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if settings.groups > 1:
        grouped = ranked.unflatten(1, (settings.groups, -1))
        kept = grouped.topk(2, -1).values.sum(-1).topk(settings.kept_groups, -1).indices
        is_kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, kept, True)
        ranked = grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    experts = ranked.topk(settings.per_token, -1).indices
    gates = scores.gather(1, experts)
    if settings.normalized:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    return Choice(experts, gates * settings.factor, scores)


class _WithLosses(torch.autograd.Function):
    """The gates, unchanged; their backward pass adds the gradient of the router's losses, and the sums of the step.

    In the backward pass, because each token of a step passes it once: a forward pass may be an evaluation's, or
    computed again. The loss has its factor already, so that no engine or pipeline stage needs to know of it.
    """

    @staticmethod
    def forward(ctx, gates, loss, sums, add):  # type: ignore[no-untyped-def]
        ctx.sums, ctx.add = sums, add
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.add(ctx.sums)
        return grad, torch.ones((), device=grad.device), None, None


class Router(nn.Module):
    """Linear scores of the experts in fp32, and a bias of each for the choice, which counts move and no gradient."""

    def __init__(self, config: ModelConfig, settings: ExpertsConfig, parallel: TensorParallel):
        super().__init__()
        self.settings, self.parallel = settings, parallel
        self.weight = nn.Parameter(torch.empty(settings.count, config.hidden_size))
        parallel.mark_replicated(self.weight)
        self.bias = None
        if settings.biased:
            self.bias = nn.Parameter(torch.empty(settings.count), requires_grad=False)
        # fp64 [E + measures]: of the step so far. No buffer: it is no part of the model, and stays fp64.
        self.step_sums: torch.Tensor | None = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        super()._apply(fn, recurse)
        if self.bias is not None:  # in half precision it could not move by bias_rate
            self.bias.data = self.bias.data.to(torch.promote_types(self.bias.dtype, torch.float32))
        return self

    def forward(self, x: torch.Tensor, context: ForwardContext) -> Choice:
        """This rank's tokens of [T, D] -> the choice for all T."""
        wide = torch.promote_types(x.dtype, torch.float32)  # fp64 stays: proofs of conversions compare in it
        logits = F.linear(x.to(wide), self.weight.to(wide))
        if self.parallel.sequence_parallel:
            logits = gather_tokens(logits, self.parallel.group)
        choice = choose(logits, self.bias, self.settings)
        if context.routed is None or not torch.is_grad_enabled():
            return choice
        loss, sums = self._losses(logits, choice, context.routed)
        return choice._replace(gates=_WithLosses.apply(choice.gates, loss, sums, self._add))

    def _losses(
        self, logits: torch.Tensor, choice: Choice, routed: RoutedTokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses times their coefficients and the factor of the step, and what `step_sums` adds up."""
        settings = self.settings
        is_chosen = torch.zeros_like(choice.scores).scatter_(1, choice.experts, 1.0)
        probabilities = choice.scores / choice.scores.sum(-1, keepdim=True)
        shares = routed.means(is_chosen) * (settings.count / settings.per_token)  # 1 if balanced
        balance = (shares * routed.means(probabilities)).sum(-1)
        z = routed.means(logits.logsumexp(-1, keepdim=True).square())[:, 0]
        loss = (settings.balance_loss * balance + settings.z_loss * z).sum() * routed.factor
        with torch.no_grad():
            entropy = routed.means(torch.special.entr(probabilities).sum(-1, keepdim=True))[:, 0]
            measures = [measure.double().sum() * routed.share for measure in (balance, z, entropy)]
            counts = (routed.members @ is_chosen).double().sum(0)
            return loss, torch.cat([counts, torch.stack(measures)])

    @torch.no_grad()
    def end_step(self, group: Group, skipped: torch.Tensor) -> torch.Tensor:
        """Move the biases by the counts of the step, unless it is skipped (1.0), and begin the next one.

        Args: group: of the ranks that have other samples.
        Returns: the sums of the step over all samples, fp64 [E + measures].
        """
        sums, self.step_sums = self.step_sums, None
        if sums is None:  # nothing below is trained
            sums = torch.zeros(
                self.settings.count + len(MEASURES), dtype=torch.float64, device=self.weight.device
            )
        if group.size > 1:
            all_reduce(sums, group)
        counts = sums[: self.settings.count]
        if self.bias is not None:
            direction = (counts.mean() - counts).sign().float()
            self.bias.add_(direction * (1.0 - skipped), alpha=self.settings.bias_rate)
        return sums

    def _add(self, sums: torch.Tensor) -> None:
        self.step_sums = sums if self.step_sums is None else self.step_sums + sums
