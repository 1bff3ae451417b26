"""Attention of a model with an encoder and a decoder: three plans from the layout of a batch.

A token is the decoder's if its `ord` is above 0. The rule of layout.py, restricted to pairs of encoder and decoder, is
the three attentions: encoder x encoder and decoder x decoder are plans of plan.py on a subset of the layout. Of the
encoder a decoder's token sees what is content (`ord` 0), and all of it, which is one range: so cross-attention is a
full rectangle of queries and keys for each document, without a mask. MASS's hidden fragment has `ord` -1 and lies
outside of it. The plan of cross-attention is one of plan.py as well, whose keys are other tokens than its queries.

Shapes: Te, Td tokens of encoder and decoder, padding included; H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.cpu_plan import CpuPlan
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.interface import BatchPlan, EncoderDecoderPlan
from megatron_lite.transformer.attention_backends.layout import FULL, DocumentGroup, Layout, QueryRange
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.attention_backends.varlen import cross_varlen_plan


def plan_encoder_decoder(
    layout: Layout,
    device: torch.device,
    kernel: str = "auto",
    multiple: int = 1,
    length: int | None = None,
    has_cross: bool = True,
) -> EncoderDecoderPlan:
    """Choose the kernels of a batch for encoder and decoder, and lay out the tokens of both.

    Args:
        kernel, multiple: as for `plan_attention`, for each of the two.
        length: Te + Td; None = as many as there are, and padding. At least `constant_length`.
        has_cross: whether the decoder attends to the encoder's tokens.
    """
    encoder_layout, decoder_layout = layout.encoder_and_decoder
    encoder = plan_attention(encoder_layout, device, kernel, multiple)
    if length is not None:
        # What the encoder leaves of the constant sum: stages exchange one shape, though Te and Td vary from batch to
        # batch.
        multiple = length - len(encoder.order)
    decoder = plan_attention(decoder_layout, device, kernel, multiple)
    return EncoderDecoderPlan(
        encoder,
        decoder,
        _plan_cross(layout, encoder, decoder, device, kernel) if has_cross else None,
        (len(encoder.order), len(decoder.order)),
        np.concatenate([encoder.order, decoder.order]),
    )


def constant_length(tokens: int, multiple: int) -> int:
    """Te + Td that suffices for any batch of `tokens`, encoder and decoder each padded to a multiple, never empty."""
    return (-(-tokens // multiple) + 1) * multiple


def _plan_cross(
    layout: Layout, encoder: BatchPlan, decoder: BatchPlan, device: torch.device, kernel: str
) -> BatchPlan:
    if kernel == "dense":
        return DensePlan(layout, is_cross=True)
    # Built on the orders of both plans, so that neither side moves tokens for cross-attention.
    groups, keys = cross_attention_groups(layout, decoder.order, encoder.order), len(encoder.order)
    if kernel == "cpu" or (kernel == "auto" and device.type == "cpu"):
        return CpuPlan(layout.encoder_and_decoder[1], groups, decoder.order, keys)
    return cross_varlen_plan(groups, decoder.order, keys)


def cross_attention_groups(layout: Layout, queries: np.ndarray, keys: np.ndarray) -> list[DocumentGroup]:
    """One full query range for each range of decoder queries that sees encoder keys, in the order of the queries.

    Args: queries, keys: the orders of the decoder's and of the encoder's plan.
    """
    document = np.full(layout.shape[0] * layout.shape[1] + 1, -1, np.int64)  # the last is padding's, index -1
    document[layout.batch_index] = layout.document
    query_document = document[queries]
    # Only content is seen from the decoder: a hidden fragment (MASS) and the decoder's own tokens are no keys.
    document[layout.batch_index[layout.key_time != 0]] = -1
    key_document = document[keys]
    key_ranges = {number: (start, stop) for start, stop, number in _document_ranges(key_document)}
    assert len(key_ranges) == sum(1 for _ in _document_ranges(key_document)), (
        "a document's content is one range"
    )
    groups = []
    for start, stop, number in _document_ranges(query_document):
        if number in key_ranges:
            first, last = key_ranges[number]
            rectangle = QueryRange(FULL, 0, stop - start, ((0, last - first),))
            groups.append(DocumentGroup(start, stop, (rectangle,), (first, last)))
    return groups


def _document_ranges(document: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Start, stop and number of each range of one document; padding has numbers below 0."""
    begins = np.flatnonzero(np.r_[len(document) > 0, np.diff(document) != 0])
    ends = np.r_[begins[1:], len(document)]
    for start, stop, number in zip(begins.tolist(), ends.tolist(), document[begins].tolist(), strict=True):
        if number >= 0:
            yield start, stop, number
