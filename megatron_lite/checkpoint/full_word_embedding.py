"""Words of a discriminator as one table, where a checkpoint has a generator's words and a difference to them."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.checkpoint.manifest import Checkpoint


def with_whole_words(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint whose boxes of the encoder's words are followed by the generator's, to be added to them."""
    own, others = (f"{stack}.embedding.word_embeddings.weight" for stack in ("encoder", "generator"))
    added = [replace(piece, name=own, is_added=True) for piece in checkpoint.pieces if piece.name == others]
    return replace(checkpoint, pieces=(*checkpoint.pieces, *added))
