"""Planted bugs of listed spans, formats of inputs and short samples."""

from __future__ import annotations

from support.plants.plant import Plant

_LISTED = "tests/data/objectives/test_listed_spans.py"
_FORMATS = "tests/data/objectives/test_input_formats.py"
_SHORT = "tests/data/loader/test_short.py"

VARIANTS = (
    Plant(
        "a listed span masked beyond 15 %",
        "data_utils/objectives/masking.py",
        "if length == 0 or length > budget or (gap",
        "if length == 0 or (gap",
        (f"{_LISTED}::test_masks_have_the_probabilities_of_all_draws",),
    ),
    Plant(
        "texts cut in two within a listed span",
        "data_utils/objectives/masked_text.py",
        "return _next_unit_start(split, unit_start) if settings.splits == Split.AT_UNITS else split",
        "return split",
        (f"{_LISTED}::test_ernie_masks_all_of_a_listed_span_or_nothing",),
    ),
    Plant(
        "a listed span one token shorter than its text",
        "data_utils/build/annotations.py",
        "lengths[first] = last - first",
        "lengths[first] = max(1, last - first - 1)",
        ("tests/data/build/test_mentions.py::test_spans_have_their_length_in_tokens_on_the_first",),
    ),
    Plant(
        "a corpus without spans taken for one whose texts have none, in later phases",
        "data_utils/loader/loader.py",
        "[choice.section for choice in self.all_choices]",
        "[choice.section for choice in self.choices]",
        ("tests/train/test_listed_spans.py::test_a_phase_may_begin_to_read_spans",),
    ),
    Plant(
        "separators between documents masked",
        "data_utils/objectives/masked_text.py",
        "if text[i] == settings.sep or text[i] == settings.eos:",
        "if text[i] == settings.eos:",
        (f"{_FORMATS}::test_masks_are_uniform_over_the_tokens_of_joined_documents",),
    ),
    Plant(
        "the sentence that a window cuts left out",
        "data_utils/objectives/input_formats.py",
        "        _end_chunk(out)\n        _append(out, text[stop:])",
        "        _end_chunk(out)\n        _append(out, text[len(text) - 1 :])",
        (f"{_FORMATS}::test_every_token_comes_once_and_examples_end_with_sentences",),
    ),
    Plant(
        "short samples that all begin with the text",
        "data_utils/loader/short_samples.py",
        "first = start + below(rng, length - size + 1)",
        "first = start",
        (f"{_SHORT}::test_a_tenth_of_the_parts_is_short_with_uniform_lengths_and_places",),
    ),
    Plant(
        "a block's weights counted as what it saves",
        "megatron_lite/estimate/block_costs.py",
        "return _Pass(tokens, saved - weights, ",
        "return _Pass(tokens, saved, ",
        ("tests/estimate/test_estimate.py::test_parts_of_memory_match_a_hand_calculation",),
    ),
)
