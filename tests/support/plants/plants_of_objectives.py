"""Planted bugs of UL2, masked diffusion, fill in the middle, and of annotations of tokens."""

from __future__ import annotations

from support.plants.plant import RECIPES, Plant
from support.plants.plants_of_variants import VARIANTS

MENTIONS = "tests/data/build/test_mentions.py"
SHIFTED = "tests/data/objectives/test_decoder_inputs.py::test_a_decoder_reads_its_labels_shifted_right"
PAIRS = "tests/data/build/test_labelled_pairs.py"
WORDS = "tests/data/objectives/test_whole_words.py::test_words_begin_where_the_text_has_them"
TEXT_PAIRS = "tests/data/pairs/test_text_pair_batches.py"
PAIR_CORPORA = "tests/data/loader/test_pair_corpora.py"

OBJECTIVES = (
    Plant(
        "UL2's continuations of half the length",
        "data_utils/objectives/ul2.py",
        "int(2 * ratio * length + 0.5) - 1",
        "int(ratio * length + 0.5) - 1",
        (
            "tests/data/objectives/test_recipe_statistics.py::test_continuations_of_ul2_are_uniform_with_the_mean_that_is_asked_for",
        ),
    ),
    Plant(
        "UL2's losses reported as one",
        "data_utils/objectives/ul2.py",
        "mark_document(row, offset, end, chunk.document, settings.loss + mode)",
        "mark_document(row, offset, end, chunk.document, settings.loss)",
        (f"{RECIPES}::test_the_text_can_be_rebuilt", "tests/train/test_layouts.py"),
    ),
    Plant(
        "masked diffusion divided by the weights of its masks",
        "megatron_lite/transformer/batch.py",
        "return np.where(by_tokens, np.float32(1.0), self.weights)",
        "return self.weights",
        ("tests/train/test_masked_diffusion.py",),
    ),
    Plant(
        "an evaluation of masked diffusion divided by the weights of its masks",
        "megatron_lite/train/evaluation.py",
        "sums = self._loss_normalizer.with_token_counts(sums, loss_divisors)",
        "pass",
        ("tests/train/test_masked_diffusion.py",),
    ),
    Plant(
        "masks of diffusion that weigh the same",
        "data_utils/objectives/masked_diffusion.py",
        "weights[i] = np.float32(1.0 / share)",
        "weights[i] = np.float32(1.0)",
        ("tests/data/objectives/test_masked_diffusion.py",),
    ),
    Plant(
        "masks fixed by the probability with noise",
        "megatron_lite/inference/unmasking.py",
        "sure = logits.softmax(-1)",
        "sure = noisy.softmax(-1)",
        ("tests/inference/test_unmasking.py",),
    ),
    Plant(
        "guidance that keeps the text",
        "megatron_lite/inference/unmasking.py",
        "alone[:first] = self._mask",
        "alone[:0] = self._mask",
        ("tests/inference/test_unmasking.py",),
    ),
    Plant(
        "a mode that is asked for but not written",
        "megatron_lite/inference/decoders.py",
        "writing.modes.get(mode, writing.before)",
        "writing.before",
        ("tests/scripts/test_generate_script.py::test_a_mode_chooses_the_token_before_the_text",),
    ),
    Plant(
        "a middle that begins where the suffix does",
        "data_utils/objectives/fill_in_middle.py",
        "copy_range(row[TARGETS], at, at + last - first, text, first)",
        "copy_range(row[TARGETS], at, at + last - first, text, last)",
        (f"{RECIPES}::test_the_text_can_be_rebuilt",),
    ),
    Plant(
        "an entity on the last token of its mention",
        "data_utils/corpus/mentions.py",
        "for first, _, entity in mention_tokens(mentions, offsets, text):\n        entities[first] = entity",
        "for _, last, entity in mention_tokens(mentions, offsets, text):\n        entities[last - 1] = entity",
        (f"{MENTIONS}::test_an_entity_stands_on_the_first_token_of_its_mention",),
    ),
    Plant(
        "duplicates that leave without their entities",
        "data_utils/build/corpus.py",
        "arrays = {name: array[masks[counted_in(name)]] for name, array in arrays.items()}",
        "kept = {name: masks[counted_in(name)] for name in arrays}\n"
        "            kept |= {name: np.arange(len(kept[name])) < kept[name].sum() for name in further}\n"
        "            arrays = {name: array[kept[name]] for name, array in arrays.items()}",
        (f"{MENTIONS}::test_duplicates_leave_with_their_entities",),
    ),
    Plant(
        "entities that are drawn from another Example",
        "megatron_lite/models/ernie_thu/batch.py",
        "drawn = begins[example] + (choice * counts)",
        "drawn = (choice * counts)",
        ("tests/ernie_thu/test_draws.py::test_shares_of_replaced_removed_and_kept_entities",),
    ),
    Plant(
        "entities of a task that the marks before them do not move",
        "data_utils/tasks/templates/marked.py",
        "mention = Mention(marked.start(start), marked.end(end), entity)",
        "mention = Mention(start, end, entity)",
        ("tests/tasks/test_marked.py::test_entities_stand_on_the_first_tokens_of_their_mentions",),
    ),
    Plant(
        "keys and values of entities exchanged in the published layout",
        "megatron_lite/models/ernie_thu/huggingface.py",
        '("query", "key", "value")',
        '("query", "value", "key")',
        ("tests/ernie_thu/test_huggingface.py::test_the_run_computes_what_the_source_does",),
    ),
    Plant(
        "a task whose model reads its tokens alone",
        "megatron_lite/models/ernie_thu/model.py",
        "mentions: Any = batch.extra_inputs.mentions",
        "mentions: Any = replace(batch.extra_inputs.mentions, vectors=batch.extra_inputs.mentions.vectors * 0)",
        ("tests/ernie_thu/test_tasks.py::test_the_answers_match_the_reference",),
    ),
    Plant(
        "only tokens with an entity have the bias of the joined streams",
        "megatron_lite/models/ernie_thu/model.py",
        "attended) + self.entity_bias",
        "attended) + self.entity_bias * (context.plan is None)",
        ("tests/ernie_thu/test_model.py::test_losses_and_gradients_match_the_reference",),
    ),
    *VARIANTS,
    Plant(
        "the label of a pair on the one before it",
        "data_utils/build/labelled_pairs.py",
        "labels[ends - lengths[:, 1]] = [pair.label for pair in pairs]",
        "labels[ends - lengths[:, 1]] = np.roll([pair.label for pair in pairs], -1)",
        (f"{PAIRS}::test_texts_become_pairs_in_the_split_of_their_text",),
    ),
    Plant(
        "samples of corpora of pairs whose objective is drawn",
        "data_utils/loader/pair_corpora.py",
        "return np.where(owners >= 0, owners, super().choose(sample_indices))",
        "return super().choose(sample_indices)",
        (f"{PAIR_CORPORA}::test_each_pair_comes_once_in_an_epoch_of_its_corpus_and_for_its_objective",),
    ),
    Plant(
        "negatives of another source",
        "data_utils/loader/mixture.py",
        "units, places = np.divmod(np.asarray(indices, np.int64) - self.start.first_sample, self.unit)",
        "units = np.asarray(indices, np.int64) - self.start.first_sample\n        places = units * 0",
        (f"{TEXT_PAIRS}::test_each_batch_is_of_one_corpus_with_exact_quotas",),
    ),
    Plant(
        "texts of pairs cut before their prompt",
        "data_utils/objectives/contrastive.py",
        "end = _write_text(row, offset, chunks.tokens[start : start + length], specials, settings)",
        "end = _write_text(row, offset, chunks.tokens[: start + chunks.lengths[k]][-length:], specials, settings)",
        (f"{TEXT_PAIRS}::test_texts_stand_as_transformers_reads_them",),
    ),
    Plant(
        "records with a text of an earlier one not left out",
        "megatron_lite/models/text_pairs/batch.py",
        "is_first &= found",
        "pass",
        (f"{TEXT_PAIRS}::test_records_with_a_text_of_an_earlier_one_are_left_out",),
    ),
    Plant(
        "pairs cut where a window ends",
        "data_utils/loader/pair_corpora.py",
        "return self._starts[windows], self._stops[windows]",
        "return super().costs(windows)",
        (f"{PAIR_CORPORA}::test_windows_hold_whole_documents_as_many_as_fit",),
    ),
    Plant(
        "inputs of T5's and UL2's decoder one token late",
        "data_utils/objectives/t5.py",
        "copy_range(row[TOKENS], part_b + 1, end, row[TARGETS], part_b)",
        "copy_range(row[TOKENS], part_b, end, row[TARGETS], part_b)",
        (f"{SHIFTED}[t5]", f"{SHIFTED}[ul2]"),
    ),
    Plant(
        "inputs of BART's decoder one token late",
        "data_utils/objectives/bart.py",
        "copy_range(row[TOKENS], first + 1, end, text, 0)",
        "copy_range(row[TOKENS], first, end, text, 0)",
        (f"{SHIFTED}[bart]",),
    ),
    Plant(
        "inputs of MASS's decoder one token late",
        "data_utils/objectives/mass.py",
        "copy_range(row[TOKENS], part_b + 1, end, text, first)",
        "copy_range(row[TOKENS], part_b, end, text, first)",
        (f"{SHIFTED}[mass]",),
    ),
    Plant(
        "words by `##`, whatever prefix a tokenizer has",
        "data_utils/tokenizers/word_marks.py",
        "continues = has_text and name.startswith(self.mark)",
        'continues = has_text and name.startswith("##")',
        (f"{WORDS}[wordpiece @@]",),
    ),
    Plant(
        "no word begins after a token that ends one",
        "data_utils/tokenizers/vocabulary.py",
        "starts[1:] |= self.word_end[tokens[:-1]]",
        "starts[1:] |= self.word_end[tokens[1:]]",
        (f"{WORDS}[bpe with a suffix]", f"{WORDS}[byte level]"),
    ),
)
