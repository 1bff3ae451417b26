"""The attention rule written out as a matrix, and the leak test: numpy references for small examples.

key_time(k)    = ord[k] if ord[k] >= 0 else infinity
query_bound(q) = ord[q] if ord[q] >= 0 else -ord[q] - 1
allowed(q, k)  = doc[q] == doc[k] and (key_time(k) <= query_bound(q) or grp[q] == grp[k] != 0)
"""

from __future__ import annotations

import numpy as np


def allowed(doc: np.ndarray, order: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Bool [N, N]: may query row q read key row k? Padding (doc -1) reads and is read by nothing."""
    key_time = np.where(order >= 0, order.astype(np.float64), np.inf)
    query_bound = np.where(order >= 0, order, -order - 1)
    by_order = key_time[None, :] <= query_bound[:, None]
    by_group = (group[:, None] == group[None, :]) & (group[:, None] != 0)
    same_document = (doc[:, None] == doc[None, :]) & (doc[:, None] >= 0)
    return same_document & (by_order | by_group)


def reachable(mask: np.ndarray) -> np.ndarray:
    """Transitive closure: what can influence row q through any number of layers, itself included."""
    reach = mask | np.eye(len(mask), dtype=bool)
    while True:
        further = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
        if (further == reach).all():
            return reach
        reach = further


def leaks(
    tokens: np.ndarray, targets: np.ndarray, weights: np.ndarray, mask: np.ndarray
) -> list[tuple[int, int]]:
    """Pairs (predicting row, row it can reach whose input is the predicted token).

    The text must consist of distinct tokens, so that a token names one place in it.
    """
    reach = reachable(mask)
    is_answer = (tokens[None, :] == targets[:, None]) & (weights[:, None] > 0)
    return [(int(q), int(k)) for q, k in np.argwhere(reach & is_answer)]
