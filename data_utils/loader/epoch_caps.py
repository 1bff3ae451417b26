"""Caps on how often a run reads its corpora: `max_epochs` in data.train.

A corpus that its weights would have read more often is lowered, in all phases alike. What it loses goes to the other
corpora by their weights, again until none exceeds its cap. The result is a number of samples for each corpus and phase,
and from it the quotas of a block of the mixture: a run with caps is the run that has these quotas as weights. So a
sample stays a pure function of its number, while another length of the run makes other quotas.

Quotas are whole, so samples are rounded down and counted as they are dealt, the last, partial block too; what rounding
leaves goes to the corpus with the most room. The price: of each capped corpus up to 1/4096 of the run's samples less
than its cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from data_utils.common.errors import ConfigError
from data_utils.loader.config import PhaseSamples
from data_utils.loader.mixture import Mixture, dealt_samples

MixturesOf = Callable[[Sequence[PhaseSamples], Sequence[Sequence[float]]], list[Mixture]]

_ROUNDS = 20_000
_PATIENCE, _PROGRESS = 100, 1e-3  # rounds in which this share of what is missing must be found
_TRIES = 20
_EXACT = 1e-9  # of a phase's samples


def capped_weights(
    weights: Sequence[Sequence[float]],
    windows: Sequence[Sequence[int]],
    seed: int,
    phases: Sequence[PhaseSamples],
    mixtures_of: MixturesOf,
) -> list[list[float]]:
    """The weights of each phase with which no corpus is read more often than its `max_epochs`.

    Args:
        weights: [phases][corpora], in samples.
        windows: [phases][corpora], of an epoch, at the phase's length.
        seed: of the mixtures. mixtures_of: makes them from phases and weights.
    Returns: [phases][corpora]; `weights` if they keep the caps, else quotas.
    Raises: ConfigError where there is too little text.
    """
    fitting = _fitting_weights(weights, windows, seed, phases, mixtures_of)
    if fitting is not None:
        return fitting  # a corpus of less than one sample has none, as corpus_report.py warns
    steps = sum(phase.steps for phase in phases)
    enough, too_many = 0, steps
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if _fitting_weights(weights, windows, seed, _shortened(phases, middle), mixtures_of) is None:
            too_many = middle
        else:
            enough = middle
    fewer = f"train {enough:,} steps, " if enough else ""
    raise ConfigError(
        f"data.train has too little text for max_epochs: it suffices for {enough:,} of the {steps:,} steps of the "
        f"run; {fewer}add text, or raise max_epochs."
    )


def _shortened(phases: Sequence[PhaseSamples], steps: int) -> list[PhaseSamples]:
    """The phases of the first steps. Batches grow within a phase, so at least its samples are counted."""
    kept: list[PhaseSamples] = []
    for phase in phases:
        if steps <= 0:
            break
        samples = -(-(phase.stop_sample - phase.first_sample) * min(steps, phase.steps) // phase.steps)
        kept.append(phase._replace(stop_sample=phase.first_sample + samples, steps=min(steps, phase.steps)))
        steps -= phase.steps
    return kept


def _fitting_weights(
    weights: Sequence[Sequence[float]],
    windows: Sequence[Sequence[int]],
    seed: int,
    phases: Sequence[PhaseSamples],
    mixtures_of: MixturesOf,
) -> list[list[float]] | None:
    """As `capped_weights`; None where there is too little text."""
    caps = [corpus.max_epochs for corpus in phases[0].data.train]
    max_epochs = np.array([np.inf if cap is None else cap for cap in caps], np.float64)
    counts = np.array([phase.stop_sample - phase.first_sample for phase in phases])
    shares, per_epoch = (np.array(each[: len(phases)], np.float64) for each in (weights, windows))

    def excess(fitting: Sequence[Sequence[float]]) -> np.ndarray:
        epochs = mixtures_of(phases, fitting)[-1].epochs(int(counts[-1]))
        return np.maximum(np.array(epochs) - max_epochs, 0)

    plain = [list(each) for each in weights[: len(phases)]]
    if not excess(plain).any():
        return plain
    shares /= shares.sum(1, keepdims=True)  # behind the check of all weights: sums of 0 are refused there
    limits = max_epochs.copy()
    for _ in range(_TRIES):
        samples = share_out(shares * counts[:, None], per_epoch, limits) if np.all(limits > 0) else None
        if samples is None:
            return None
        room = max_epochs - (samples / per_epoch).sum(0)
        fitting = [
            _whole_quotas(samples[number], room, dealt_samples(seed, int(count), number))
            for number, count in enumerate(counts)
        ]
        too_much = excess(fitting)
        if not too_much.any():
            return fitting
        # Where phases change the length, samples at their boundaries hold more or less text than a window, and where no
        # corpus has room, rounding goes too far.
        limits -= too_much
    return None


def share_out(samples: np.ndarray, per_epoch: np.ndarray, max_epochs: np.ndarray) -> np.ndarray | None:
    """The samples of corpora under their caps; None if there is too little text.

    Args:
        samples: float [phases, corpora], without caps. Each phase keeps their sum.
        per_epoch: float [phases, corpora], samples of an epoch.
        max_epochs: float [corpora], above 0, over all phases; inf = no cap.
    """
    wanted, capped = samples.sum(1), np.zeros(samples.shape[1], bool)
    checked, missed = 0, np.inf
    for number in range(_ROUNDS):
        epochs = (samples / per_epoch).sum(0)
        over = epochs > max_epochs
        samples = samples * np.divide(max_epochs, epochs, where=over, out=np.ones_like(epochs))
        missing = wanted - samples.sum(1)
        if np.all(missing <= _EXACT * wanted):
            return samples
        # What is missing may grow for some rounds, while a capped corpus moves from phases that have others to one that
        # has none.
        if np.any(over & ~capped):
            checked, missed = number, np.inf
        elif number == checked + _PATIENCE:
            if missing.sum() > (1 - _PROGRESS) * missed:
                return None
            checked, missed = number, missing.sum()
        capped = capped | over
        others = np.where(capped, 0.0, samples)
        # A phase whose corpora are all capped needs them nevertheless: they grow there, and are lowered in all phases
        # again, until what they lose in the other phases suffices.
        growing = np.where(others.any(1, keepdims=True), others, samples)
        samples = samples + growing * (missing / growing.sum(1))[:, None]
    return None


def _whole_quotas(samples: np.ndarray, room: np.ndarray, dealt: np.ndarray) -> list[float]:
    """Quotas of a block by which no corpus but the one with the most room gets more than its samples.

    Args: samples, room: float [corpora]. dealt: of `dealt_samples`, for the phase.
    """
    whole, last = np.floor(samples + 1e-6).astype(np.int64), len(samples) - 1
    rest = max(np.flatnonzero(samples > 0).tolist(), key=lambda corpus: (room[corpus], samples[corpus]))
    starts = np.zeros(last + 2, np.int64)
    starts[-1] = len(dealt) - 1
    # The slots of a corpus are a range of a block. Which samples they get in the last block depends on where the range
    # is, so ranges are laid from both ends towards the corpus that takes the rest.
    for corpus in range(rest):
        reached = np.searchsorted(dealt, dealt[starts[corpus]] + whole[corpus], side="right") - 1
        starts[corpus + 1] = max(starts[corpus], np.searchsorted(dealt, dealt[reached]))
    for corpus in range(last, rest, -1):
        reached = np.searchsorted(dealt, dealt[starts[corpus + 1]] - whole[corpus])
        stop = np.searchsorted(dealt, dealt[reached], side="right") - 1
        starts[corpus] = min(starts[corpus + 1], stop)
    return [float(quota) for quota in np.diff(starts)]
