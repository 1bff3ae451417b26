"""Attention of a model with an encoder and a decoder: three plans from the layout of a batch.

A token is the decoder's if its `ord` is above 0. The rule of layout.py, restricted to pairs of parts, is the three
attentions: encoder x encoder and decoder x decoder are plans of plan.py on a part of the layout. Of the encoder a
decoder's token sees what is content (`ord` 0), and all of it, which is one stretch: so cross-attention is a full
rectangle for each document, without a mask. MASS's hidden fragment has `ord` -1 and lies outside of it. Its plan is one
of plan.py as well, whose keys are other tokens than its queries.

Shapes: Te, Td rows of encoder and decoder, padding included; H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatron_lite.model.attention_backends.calls import HostPlan, PartsPlan
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.layout import FULL, Call, Layout, Unit
from megatron_lite.model.attention_backends.plan import CallPlan, plan_attention
from megatron_lite.model.attention_backends.varlen import cross_varlen_plan


def plan_parts(
    layout: Layout,
    device: torch.device,
    kernel: str = "auto",
    multiple: int = 1,
    length: int | None = None,
    has_cross: bool = True,
) -> PartsPlan:
    """Choose the kernels of a batch for encoder and decoder, and lay out the tokens of both.

    Args:
        kernel, multiple: as for `plan_attention`, for each part.
        length: Te + Td; None = as many as there are, and padding. At least those of `constant_length`.
        has_cross: whether the decoder attends to the encoder's rows.
    """
    of_encoder, of_decoder = layout.parts
    encoder = plan_attention(of_encoder, device, kernel, multiple)
    if length is not None:
        # What the encoder leaves of the constant sum: stages exchange one shape, though both parts vary from batch to
        # batch.
        multiple = length - len(encoder.order)
    decoder = plan_attention(of_decoder, device, kernel, multiple)
    return PartsPlan(
        encoder,
        decoder,
        _plan_cross(layout, encoder, decoder, device, kernel) if has_cross else None,
        (len(encoder.order), len(decoder.order)),
        np.concatenate([encoder.order, decoder.order]),
    )


def constant_length(places: int, multiple: int) -> int:
    """Rows Te + Td that suffice for any batch of `places` tokens, each part padded to a multiple and never empty."""
    return (-(-places // multiple) + 1) * multiple


def _plan_cross(
    layout: Layout, encoder: HostPlan, decoder: HostPlan, device: torch.device, kernel: str
) -> HostPlan:
    if kernel == "dense":
        return DensePlan(layout, is_cross=True)
    # Built on the orders of both plans, so that neither side moves tokens for cross-attention.
    units, keys = rectangles(layout, decoder.order, encoder.order), len(encoder.order)
    if kernel == "calls" or (kernel == "auto" and device.type == "cpu"):
        return CallPlan(layout.parts[1], units, decoder.order, keys)
    return cross_varlen_plan(units, decoder.order, keys)


def rectangles(layout: Layout, queries: np.ndarray, keys: np.ndarray) -> list[Unit]:
    """A full call for each range of decoder queries that sees encoder keys, in the order of the queries.

    Args: queries, keys: the orders of the parts' plans.
    """
    places = layout.shape[0] * layout.shape[1]
    document = np.full(places + 1, -1, np.int64)  # the last place is padding's, index -1
    document[layout.rows] = layout.document
    of_queries = document[queries]
    # Only content is seen from the decoder: a hidden fragment (MASS) and the decoder's own tokens are no keys.
    document[layout.rows[layout.key_time != 0]] = -1
    of_keys = {number: (start, stop) for start, stop, number in _stretches(document[keys])}
    assert len(of_keys) == sum(1 for _ in _stretches(document[keys])), "a document's content is one stretch"
    return [
        _rectangle(start, stop, of_keys[number])
        for start, stop, number in _stretches(of_queries)
        if number in of_keys
    ]


def _rectangle(start: int, stop: int, keys: tuple[int, int]) -> Unit:
    return Unit(start, stop, (Call(FULL, 0, stop - start, ((0, keys[1] - keys[0]),)),), keys)


def _stretches(document: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Start, stop and number of the stretches of one document; padding has numbers below 0."""
    begins = np.flatnonzero(np.r_[len(document) > 0, np.diff(document) != 0])
    ends = np.r_[begins[1:], len(document)]
    for start, stop, number in zip(begins.tolist(), ends.tolist(), document[begins].tolist(), strict=True):
        if number >= 0:
            yield start, stop, number
