"""Planted bugs of vectors of texts."""

from __future__ import annotations

from support.plants.plant import Plant

VECTORS = "tests/embedding/test_vectors.py"
TSDAE = "tests/embedding/test_tsdae.py"
POOLING = "megatron_lite/transformer/pooling.py"
EMBEDDER = "megatron_lite/embedding/embedder.py"
LOSSES, STEP = "megatron_lite/transformer/pair_losses.py", "megatron_lite/engine/vector_loss.py"
LAYOUTS, PAIRS = "tests/embedding/test_layouts.py", "tests/embedding/test_pair_losses.py"
TRAINING = "tests/embedding/test_training.py::test_steps_equal_sentence_transformers"
CHUNKS, TWO_RANKS = (
    f"{LAYOUTS}::test_layouts_equal_one_process[tensor1-pipeline1-data{ranks}-size2-zero1-sequenceFalse-poolingmean-systembert-kindpairs]"
    for ranks in (1, 2)
)

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
    Plant(
        "the gradient of a rank's own rows alone",
        STEP,
        "all_reduce(gradient, group)",
        "pass",
        (TWO_RANKS,),
    ),
    Plant(
        "the rows of a rank compared with those of the first rank",
        STEP,
        "rows = own[own >= 0]",
        "rows = np.arange(int((own >= 0).sum()))",
        (TWO_RANKS,),
    ),
    Plant(
        "cosines divided by the temperature twice",
        LOSSES,
        "scores = rows @ columns.T / self.temperature",
        "scores = rows @ columns.T / self.temperature / self.temperature",
        (f"{PAIRS}::test_info_nce_is_sentence_transformers_class",),
    ),
    Plant(
        "the loss of pairs divided by the records of one rank",
        STEP,
        "return sums, [scale * gradient for gradient in gradients]",
        "return sums, [group.size * scale * gradient for gradient in gradients]",
        (TWO_RANKS,),
    ),
    Plant(
        "cosines in bf16",
        LOSSES,
        "vectors = vectors.float()",
        "vectors = vectors.bfloat16().float()",
        (f"{PAIRS}::test_info_nce_is_sentence_transformers_class",),
    ),
    Plant(
        "Matryoshka's vectors not normalized anew",
        LOSSES,
        "unit = F.normalize(cut, dim=-1)",
        "unit = cut / vectors.norm(dim=-1, keepdim=True)",
        (f"{PAIRS}::test_matryoshka_is_sentence_transformers_class",),
    ),
    Plant(
        "equal texts as negatives of each other",
        LOSSES,
        "return (texts == own_query[:, None]) | (texts == own_positive[:, None]) | ~is_used",
        "return (~is_used).expand(len(rows), -1)",
        (f"{PAIRS}::test_texts_that_are_no_negatives_are_left_out",),
    ),
    Plant(
        "other dropout in the second pass of a step of pairs",
        "megatron_lite/engine/plain.py",
        "again = vectors[0] if is_only else self._engine(self._on_device(micro_batch))[0]",
        "micro_batch = __import__('dataclasses').replace(micro_batch, dropout=None)\n"
        "            again = vectors[0] if is_only else self._engine(self._on_device(micro_batch))[0]",
        (CHUNKS,),
    ),
    Plant(
        "the same dropout for a text and its second copy",
        "megatron_lite/transformer/kernels/dropout.py",
        "sample_keys[:, None] + np.arange(length, dtype=np.uint64)",
        "sample_keys[:, None] + np.zeros(length, dtype=np.uint64)",
        (f"{LAYOUTS}::test_the_same_text_twice_differs_by_dropout_alone",),
    ),
    Plant(
        "a positive that equals its query is left out",
        LOSSES,
        "to_documents.masked_fill(excluded & ~is_positive, -torch.inf)",
        "to_documents.masked_fill(excluded, -torch.inf)",
        (f"{LAYOUTS}::test_one_process_equals_plain_torch[cls-twice]",),
    ),
    Plant(
        "the teacher's vectors of other records",
        "megatron_lite/models/text_pairs/batch.py",
        "index.vectors[windows[numbers]]",
        "index.vectors[numbers]",
        (f"{TRAINING}[bert-teacher-0-3]",),
    ),
    Plant(
        "vectors of a teacher may be of other texts",
        "data_utils/loader/text_pairs.py",
        'np.array_equal(np.fromfile(path, "<u8"), queries)',
        'len(np.fromfile(path, "<u8")) == len(queries)',
        (
            "tests/data/pairs/test_text_pair_batches.py::"
            "test_vectors_of_other_texts_are_refused_if_their_hashes_are_there",
        ),
    ),
    Plant(
        "the distance from a teacher's vector before the student's is normalized",
        LOSSES,
        "finished(leaf, normalize) - targets",
        "finished(leaf, False) - targets",
        (f"{LAYOUTS}::test_one_process_equals_plain_torch[mean-teacher]",),
    ),
    Plant(
        "a record's distance summed over its texts",
        STEP,
        "gradients.append(gradient / texts)",
        "gradients.append(gradient)",
        (f"{LAYOUTS}::test_one_process_equals_plain_torch[mean-teacher]",),
    ),
    Plant(
        "GLM reads the texts of pairs as BERT does",
        "megatron_lite/config/systems.py",
        '"blank_infilling": "glm", ',
        "",
        (f"{TRAINING}[glm-positive-2-3]",),
    ),
    Plant(
        "another begin of a decoder's texts in training than in use",
        "megatron_lite/config/systems.py",
        'return _CAUSAL_FORMS.get(begin, "causal") if',
        'return "causal" if',
        (f"{TRAINING}[qwen2-positive-2-3]",),
    ),
    Plant(
        "a decoder that reads the encoder's state in place of the vector",
        "megatron_lite/transformer/transformer.py",
        "encoded = only_vectors(encoded, vectors, self.parallel)",
        "pass",
        (f"{TSDAE}::test_loss_and_gradients_equal_transformers[t5-mean]",),
    ),
    Plant(
        "a decoder that sees all states of a text beside its vector",
        "data_utils/objectives/tsdae.py",
        "set_range(row[ORD], offset, at, -1)",
        "set_range(row[ORD], offset, at, 0)",
        (f"{TSDAE}::test_the_decoder_writes_the_whole_text_and_the_encoder_reads_some_words_of_it",),
    ),
    Plant(
        "deleted words that stay",
        "data_utils/objectives/tsdae.py",
        "is_kept = not chance(rng, settings.deleted_below)",
        "is_kept = True",
        (f"{TSDAE}::test_the_decoder_writes_the_whole_text_and_the_encoder_reads_some_words_of_it",),
    ),
    Plant(
        "the share of words that is to be deleted is kept",
        "data_utils/objectives/tsdae.py",
        "is_kept = not chance(rng, settings.deleted_below)",
        "is_kept = chance(rng, settings.deleted_below)",
        (f"{TSDAE}::test_the_decoder_writes_the_whole_text_and_the_encoder_reads_some_words_of_it",),
    ),
    Plant(
        "the decoder's tokens in the vector that it reads",
        "megatron_lite/models/tsdae.py",
        "super().has_part & (self.fields[:, ORD].ravel() <= 0)",
        "super().has_part",
        (f"{TSDAE}::test_loss_and_gradients_equal_transformers[t5-mean]",),
    ),
    Plant(
        "padding of a batch in the vectors of its texts",
        "megatron_lite/models/tsdae.py",
        "super().has_part & (self.fields[:, ORD].ravel() <= 0)",
        "self.fields[:, ORD].ravel() <= 0",
        (f"{TSDAE}::test_loss_and_gradients_equal_transformers[t5-mean]",),
    ),
    Plant(
        "targets of a text one token too early",
        "data_utils/objectives/tsdae.py",
        "copy_range(row[TARGETS], part_b, end - 1, text, 0)",
        "copy_range(row[TARGETS], part_b, end - 2, text, 1)",
        (f"{TSDAE}::test_the_decoder_writes_the_whole_text_and_the_encoder_reads_some_words_of_it",),
    ),
    Plant(
        "stages whose decoder reads the encoder's states in place of vectors",
        "megatron_lite/engine/pipeline.py",
        "encoded = only_vectors(encoded, vectors, inputs.parallel)",
        "pass",
        (
            f"{TSDAE}::test_layouts_equal_one_process[tensor1-pipeline2-data1-size4-zero1-sequenceFalse-systembart]",
        ),
    ),
    Plant(
        "vectors whose gradient reaches the tokens of one rank alone",
        "megatron_lite/transformer/encoder_decoder.py",
        "import gather_tokens_to_split\n",
        "import gather_tokens as gather_tokens_to_split\n",
        (
            f"{TSDAE}::test_layouts_equal_one_process[tensor2-pipeline1-data2-size4-zero1-sequenceTrue-systemt5_1_1]",
        ),
    ),
)
