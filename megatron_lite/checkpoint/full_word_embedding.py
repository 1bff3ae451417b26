"""ELECTRA's discriminator alone: its word embedding is stored as a difference to the generator's."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.checkpoint.manifest import Checkpoint


def with_full_word_embedding(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a full word embedding of the encoder: readers add the generator's slices to its own.

    The pair shares words: the discriminator's table is the generator's plus what it learns itself, so that one may be
    trained without gradients of the other (gradient-disentangled sharing, arXiv:2111.09543). Without a generator,
    nothing changes.
    """
    own, others = (f"{stack}.embedding.word_embeddings.weight" for stack in ("encoder", "generator"))
    added = [
        replace(stored, name=own, is_added=True) for stored in checkpoint.slices if stored.name == others
    ]
    return replace(checkpoint, slices=(*checkpoint.slices, *added))
