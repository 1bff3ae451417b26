"""Kernels between the QKV product and attention: norms of heads, rotary positions, repeated keys."""

from __future__ import annotations

from megatron_lite.estimate.roofline import ISSUE
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally

# torch's RMSNorm in fp32, counted in traces: kernels over all numbers, kernels over one number per token, and bytes
# of the former per number of bf16.
RMS_FORWARD, RMS_BACKWARD = (6, 2, 40), (16, 2, 116)
_HEADS_BACKWARD = (13, 4, 104)  # norms of heads, whose scales are in bf16


def rms(tally: Tally, size: float, costs: tuple[int, int, int], norms: int = 1) -> None:
    """torch's RMSNorm. Args: size: bytes in bf16. costs: one of the above. norms: how many share the numbers."""
    passes, short, bytes_per_number = costs
    tally.kernel(bytes_per_number / passes * size / norms / 2, norms * passes)
    tally.small(norms * short)


class QueryKeyCosts:
    """Costs for T tokens of a stack. `spread` is the forward pass, `gather` the backward pass of the same kernels."""

    def __init__(self, sizes: Sizes, tokens: float):
        self.s, self.T, self.model = sizes, tokens, sizes.config.model
        self.has_kernels = sizes.config.training.kernels == "fused"
        self.whole = tokens * sizes.attended
        model = self.model
        self._normed = "_normed" * model.query_key_norm
        shares = model.key_value_heads < model.num_attention_heads
        needs_copy = model.query_key_norm or model.query_factor != 1.0 or shares
        self.changes = model.positions == "rotary" or needs_copy
        # A fused block rotates queries and keys in place if nothing else changes them.
        self.is_in_place = sizes.is_fused and self.changes and not needs_copy

    def spread(self, tally: Tally) -> None:
        """Forward."""
        if not self.has_kernels:
            self._by_torch(tally, RMS_FORWARD)
        elif self.is_in_place:
            self._in_place(tally)
        elif self.changes:
            self._kernel(tally, "expand_heads")

    def gather(self, tally: Tally, is_joined: bool) -> None:
        """Backward. Args: is_joined: the kernel also joins the gradients of queries, keys and values."""
        if not self.has_kernels:
            self._by_torch(tally, _HEADS_BACKWARD)
        elif self.is_in_place and not is_joined:
            self._in_place(tally)
        elif self.changes or is_joined:
            self._kernel(tally, "gather_heads", self.T * self.s.normed if self._normed else 0.0, is_joined)
            tally.small(
                bool(self._normed) and not self.s.is_fused
            )  # second pass of the sums for the scales' gradients

    @property
    def _angles(self) -> float:
        """Bytes of cosines and sines."""
        return 4 * self.T * self.model.rotary_size * (self.model.positions == "rotary")

    def _in_place(self, tally: Tally) -> None:
        tally.kernel(
            4 * self.whole * self.s.element + self._angles, issued=2 * self.whole * ISSUE["expand_heads"]
        )

    def _kernel(self, tally: Tally, kernel: str, extra: float = 0.0, is_joined: bool = False) -> None:
        """Args: extra: further numbers that are read. is_joined: as in `gather`."""
        size = (3 * self.whole + self.T * self.s.qkv + extra) * self.s.element + self._angles
        numbers = self.T * self.s.qkv if is_joined else 3 * self.whole
        tally.kernel(size, issued=numbers * ISSUE[kernel + self._normed])

    def join(self, tally: Tally) -> None:
        """Join the gradients of queries, keys and values of one launch, unchanged."""
        if self.has_kernels:
            tally.kernel(6 * self.whole * self.s.element, issued=3 * self.whole * ISSUE["gather_heads"])
        else:
            tally.kernel(2 * self.whole * self.s.element)
            tally.kernel(4 * self.whole * self.s.element)

    def _by_torch(self, tally: Tally, norms: tuple[int, int, int]) -> None:
        """By torch's operators. 1.06 is fitted to a trace, not derived."""
        s, size = self.s, self.whole * self.s.element
        if self.model.query_key_norm:
            rms(tally, self.T * s.normed * s.element, norms, 2)
            tally.kernel(2 * self.T * s.qkv * s.element)
        if self.model.positions == "rotary":
            tally.kernel(1.06 * size, 10)
            tally.kernel(6 * size)
        if self.model.query_factor != 1.0:  # scaled queries, and a concatenation with keys and values
            tally.kernel(2 * size)
            tally.kernel(6 * size)
