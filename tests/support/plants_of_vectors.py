"""Planted bugs of vectors of texts."""

from __future__ import annotations

from support.plant import Plant

VECTORS = "tests/embedding/test_vectors.py"
POOLING = "megatron_lite/transformer/pooling.py"
EMBEDDER = "megatron_lite/embedding/embedder.py"

EMBEDDINGS = (
    Plant(
        "padding in the mean of a text",
        POOLING,
        "return sums / tokens.counts.clamp(min=1)[:, None]",
        "return sums / tokens.counts.max()",
        (f"{VECTORS}::test_padding_of_a_batch_is_in_no_mean",),
    ),
    Plant(
        "the prompt left out",
        EMBEDDER,
        "encode_batch([self._prompt + text for text in texts])",
        "encode_batch([text for text in texts])",
        (f"{VECTORS}::test_a_prompt_is_read_before_the_text_is_cut_and_may_be_left_out_of_the_mean",),
    ),
    Plant(
        "the prompt in a mean that leaves it out",
        POOLING,
        "chosen = place >= skipped[document]",
        "chosen = place >= 0",
        (f"{VECTORS}::test_a_prompt_is_read_before_the_text_is_cut_and_may_be_left_out_of_the_mean",),
    ),
    Plant(
        "texts cut before the prompt is joined to them",
        EMBEDDER,
        "tokens = ids[end - length : end][:most].tolist()",
        "tokens = ids[end - length : end][: most + len(self._inputs.tokenizer.encode(self._prompt))].tolist()",
        (f"{VECTORS}::test_a_prompt_is_read_before_the_text_is_cut_and_may_be_left_out_of_the_mean",),
    ),
    Plant(
        "the first numbers of a vector not normalized anew",
        POOLING,
        "vectors = vectors[:, :dimensions]\n    return F.normalize(vectors, dim=-1) if normalize else vectors",
        "vectors = F.normalize(vectors, dim=-1) if normalize else vectors\n    return vectors[:, :dimensions]",
        (f"{VECTORS}::test_a_cut_vector_is_normalized_anew",),
    ),
)
