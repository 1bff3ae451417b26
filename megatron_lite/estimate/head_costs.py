"""Kernels between the product of queries, keys and values and their scores, for block_costs.py."""

from __future__ import annotations

from megatron_lite.estimate.roofline import ISSUE
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally

# torch's RMSNorm in fp32, kernel by kernel: launches that pass over all numbers, those over one number a token, and
# bytes of each number of bf16.
RMS_FORWARD, RMS_BACKWARD = (6, 2, 40), (16, 2, 116)
_HEADS_BACKWARD = (13, 4, 104)  # of heads, whose scales are in bf16


def rms(tally: Tally, size: float, costs: tuple[int, int, int], parts: int = 1) -> None:
    """torch's RMSNorm. Args: size: bytes. costs: of the above. parts: norms that share the numbers."""
    passes, short, bytes_of_two = costs
    tally.kernel(bytes_of_two / passes * size / parts / 2, parts * passes)
    tally.small(parts * short)


class HeadCosts:
    """Costs for T tokens of a stack."""

    def __init__(self, sizes: Sizes, tokens: float):
        self.s, self.T, self.model = sizes, tokens, sizes.config.model
        self.has_kernels = sizes.config.training.kernels == "fused"
        self.whole = tokens * sizes.attended
        model = self.model
        self._normed = "_normed" * model.query_key_norm
        shares = model.key_value_heads < model.num_attention_heads
        others = model.query_key_norm or model.query_factor != 1.0 or shares
        self.changes = model.positions == "rotary" or others
        # A fused block turns queries and keys where they are, if that is all.
        self.is_in_place = sizes.is_fused and self.changes and not others

    def spread(self, tally: Tally) -> None:
        """In the forward pass."""
        if not self.has_kernels:
            self._by_torch(tally, RMS_FORWARD)
        elif self.is_in_place:
            self._in_place(tally)
        elif self.changes:
            self._kernel(tally, "expand_heads")

    def gather(self, tally: Tally, is_joined: bool) -> None:
        """In the backward pass. Args: is_joined: with the gradients of one call put together."""
        if not self.has_kernels:
            self._by_torch(tally, _HEADS_BACKWARD)
        elif self.is_in_place and not is_joined:
            self._in_place(tally)
        elif self.changes or is_joined:
            self._kernel(tally, "gather_heads", self.T * self.s.normed if self._normed else 0.0, is_joined)
            tally.small(bool(self._normed) and not self.s.is_fused)  # the end of sums of scales

    @property
    def _angles(self) -> float:
        """Bytes of cosines and sines."""
        return 4 * self.T * self.model.rotary_size * (self.model.positions == "rotary")

    def _in_place(self, tally: Tally) -> None:
        tally.kernel(
            4 * self.whole * self.s.element + self._angles, issued=2 * self.whole * ISSUE["expand_heads"]
        )

    def _kernel(self, tally: Tally, kernel: str, more: float = 0.0, is_joined: bool = False) -> None:
        """Args: more: numbers that are read besides. is_joined: as in `gather`."""
        size = (3 * self.whole + self.T * self.s.qkv + more) * self.s.element + self._angles
        of_kernel = self.T * self.s.qkv if is_joined else 3 * self.whole
        tally.kernel(size, issued=of_kernel * ISSUE[kernel + self._normed])

    def join(self, tally: Tally) -> None:
        """Gradients of one call put together, as they are."""
        if self.has_kernels:
            tally.kernel(6 * self.whole * self.s.element, issued=3 * self.whole * ISSUE["gather_heads"])
        else:
            tally.kernel(2 * self.whole * self.s.element)
            tally.kernel(4 * self.whole * self.s.element)

    def _by_torch(self, tally: Tally, norms: tuple[int, int, int]) -> None:
        """Norms of heads, which are put together with the values, and rotary positions."""
        s, size = self.s, self.whole * self.s.element
        if self.model.query_key_norm:
            rms(tally, self.T * s.normed * s.element, norms, 2)
            tally.kernel(2 * self.T * s.qkv * s.element)
        if self.model.positions == "rotary":
            tally.kernel(1.06 * size, 10)
            tally.kernel(6 * size)
        if self.model.query_factor != 1.0:  # queries times it, and put together with keys and values
            tally.kernel(2 * size)
            tally.kernel(6 * size)
