"""A linear probe: accuracy of a logistic regression on fixed features of labelled sentences."""

# N sentences, D features, C classes

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from data_utils.common.seeds import derive_seed

LEARNT_SHARE = 0.8  # of each class's sentences, where no number is given
PENALTY = 1.0  # on half the sum of the squared weights


def fit(features: torch.Tensor, classes: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [C, D] and biases [C] with the least sum of cross entropies and penalty, which leaves out the biases."""
    weight = features.new_zeros(count, features.shape[1], requires_grad=True)
    bias = features.new_zeros(count, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias],
        max_iter=500,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        solver.zero_grad()
        entropy = F.cross_entropy(features @ weight.T + bias, classes, reduction="sum")
        value = (entropy + 0.5 * PENALTY * weight.square().sum()) / len(features)
        value.backward()
        return value

    solver.step(loss)
    return weight.detach(), bias.detach()


def accuracies(
    features: torch.Tensor,
    labels: Sequence[str],
    *,
    per_class: int | None = None,
    trials: int = 5,
    seed: int = 0,
) -> list[float]:
    """Share of right answers on the sentences that were not learnt from, of each trial.

    A trial draws `per_class` sentences of each class to learn from, by (seed, number of the trial) alone, so that
    probes on other features learn from the same ones. Without `per_class` about 80 % of each class.

    Args: features: [N, D]. labels: N, at least two classes with more than `per_class` sentences each.
    """
    names = sorted(set(labels))
    classes = torch.tensor([names.index(label) for label in labels])
    found = []
    for trial in range(trials):
        learnt = torch.from_numpy(_learnt(classes.numpy(), per_class, derive_seed(seed, "probe", trial)))
        wide = features.double()
        # By what is learnt from alone; a feature that does not vary stays 0.
        deviation, mean = torch.std_mean(wide[learnt], dim=0, correction=0)
        scaled = (wide - mean) / deviation.where(deviation > 0, 1.0)
        weight, bias = fit(scaled[learnt], classes[learnt], len(names))
        right = (scaled[~learnt] @ weight.T + bias).argmax(1) == classes[~learnt]
        found.append(right.double().mean().item())
    return found


def _learnt(classes: np.ndarray, per_class: int | None, key: int) -> np.ndarray:
    """Mask of the sentences to learn from, bool [N]."""
    order = np.argsort(np.random.Philox(key=key).random_raw(len(classes)), kind="stable")
    learnt = np.zeros(len(classes), bool)
    for number in np.unique(classes):
        own = order[classes[order] == number]
        count = per_class or min(max(1, round(LEARNT_SHARE * len(own))), len(own) - 1)
        learnt[own[:count]] = True
    return learnt


def largest_class(labels: Sequence[str]) -> float:
    """Share of the commonest label: the accuracy without features."""
    return max(Counter(labels).values()) / len(labels)
