"""Chi-square tests of drawn counts."""

from __future__ import annotations

import numpy as np


def chi_square_limit(freedom: int) -> float:
    """The 0.999 quantile (Wilson-Hilferty, within 1 % for 5 degrees of freedom and more)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    assert expected.min() >= 5, "too few samples for a chi-square"
    return float(((counts - expected) ** 2 / expected).sum())
