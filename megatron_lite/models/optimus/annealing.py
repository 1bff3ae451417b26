"""The weight of OPTIMUS's divergence as a pure function of the step, so that resuming needs no state.

Source: Fu et al., arXiv:1903.10145 (cycles); OPTIMUS, arXiv:2004.04092, section 3.3 (a part of each cycle at 0).
"""

from __future__ import annotations


def beta(step: int, steps: int, *, peak: float, cycles: int, zero_share: float, rise_share: float) -> float:
    """Weight of the divergence in step `step`, from 0, of `steps` steps.

    `cycles` cycles of steps / cycles steps, which need not be a whole number. In each it is 0 for `zero_share` of it,
    rises linearly from 0 to `peak` over `rise_share`, and stays there. From `steps` on it is `peak`.
    """
    if step >= steps:
        return peak
    phase = (
        step * cycles % steps
    ) / steps  # of the cycle, in [0, 1): by integers, so that no cycle begins late
    if phase < zero_share:
        return 0.0
    if phase - zero_share >= rise_share:
        return peak
    return peak * (phase - zero_share) / rise_share
