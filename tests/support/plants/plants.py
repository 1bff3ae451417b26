"""The bugs that support/planted.py plants: what is replaced by what, and the tests that should notice."""

from __future__ import annotations

from support.plants.plant import RECIPES, Plant
from support.plants.plants_of_benchmarks import BENCHMARKS
from support.plants.plants_of_experts import MIXTURES
from support.plants.plants_of_kernels import KERNELS
from support.plants.plants_of_objectives import OBJECTIVES
from support.plants.plants_of_positions import POSITIONS
from support.plants.plants_of_streams import STREAMS
from support.plants.plants_of_vectors import EMBEDDINGS
from support.plants.plants_of_windows import WINDOWS

PARITY = "tests/train/test_parity.py::test_layouts_equal_one_process"
FURTHER = "tests/train/test_parity.py::test_some_further_cases_equal_one_process"
HALF = "tests/train/test_parity.py::test_stages_of_zero_agree_in_half_precision"
SAME_SAMPLES = "tests/train/test_trainer.py::test_another_number_of_ranks_sees_the_same_samples"
EPOCHS = "tests/data/loader/test_mixture.py::test_each_epoch_visits_every_window_once_in_another_order"
VIEWS = "tests/transformer/test_attention_layout.py::test_views_match_the_rule"
HEADS = "tests/transformer/test_heads.py::test_heads_and_options_are_the_same_in_every_layout"
RESUMED = "tests/train/test_trainer.py::test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit"
UPDATE = "tests/transformer/test_lora.py"
PAIR, DRAWS = "tests/electra/test_model.py", "tests/electra/test_sampling.py"
SHARDED = "megatron_lite/optim/sharded.py"
BUCKETS = "megatron_lite/optim/buckets.py"
TENSOR = "megatron_lite/transformer/tensor_parallel.py"
ENGINE = "megatron_lite/engine/engine.py"
GROUPS = "megatron_lite/engine/parameter_groups.py"
TRAINER = "megatron_lite/train/trainer.py"
WRITE = "data_utils/objectives/blank_infilling/spans.py"

GRADIENTS = (
    Plant(
        "gradient of replicated parameters not summed under tensor parallelism",
        TENSOR,
        "grad_hidden, summing = grad_whole, start_all_reduce(grad_whole, group)",
        "grad_hidden, summing = grad_whole, None",
        (f"{PARITY}[2x1x1]",),
    ),
    Plant(
        "gradient of the norms not summed under sequence parallelism",
        TENSOR,
        "= self.sequence_parallel and not self.sums_at_once",
        "= False",
        (f"{PARITY}[2x1x2]",),
        "EleutherAI/gpt-neox#1257",
    ),
    Plant(
        "the same at ZeRO 3",
        TENSOR,
        "if self.sequence_parallel and self.sums_at_once",
        "if False",
        (f"{PARITY}[2x1x1]",),
    ),
    Plant(
        "gradient of the final norm differs on tensor-parallel ranks under sequence parallelism",
        "megatron_lite/transformer/lm_head.py",
        "hidden = gather_tokens(hidden, self.parallel.group)\n        vectors",
        "rows_of_all = gather_tokens(hidden, self.parallel.group)\n"
        "            own = rows_of_all * 0\n"
        "            own[self.parallel.group.rank :: self.parallel.group.size] = 1\n"
        "            hidden = rows_of_all * own + (rows_of_all * (1 - own)).detach()\n        vectors",
        (f"{PARITY}[2x1x1]",),
        "NVIDIA/Megatron-LM#1446",
    ),
    Plant(
        "ZeRO 2 reduces a block that runs twice after its first use",
        ENGINE,
        '        if self._config.model.share_layers != "none":\n            return\n',
        "",
        (HEADS,),
        "deepspeedai/DeepSpeed#8224",
    ),
    Plant(
        "tied embedding of the last pipeline stage not synchronized",
        GROUPS,
        "extra_reduce_group = self.context.pipeline_ends()",
        "extra_reduce_group = None",
        (f"{PARITY}[1x2x1]",),
    ),
    Plant(
        "gradients of the step before not zeroed",
        BUCKETS,
        "self.accumulated: set[nn.Parameter] = set()  # those with",
        'self.accumulated: set[nn.Parameter] = getattr(self, "accumulated", set())  # those with',
        (f"{PARITY}[1x1x1]",),
    ),
    Plant(
        "bf16 gradients summed in bf16",
        BUCKETS,
        "self.grad_buffer = torch.zeros(self.size, dtype=torch.float32, device=self.weights.device)",
        "self.grad_buffer = torch.zeros(self.size, dtype=self.weights.dtype, device=self.weights.device)",
        (HALF,),
        "deepspeedai/DeepSpeed#1800",
    ),
    Plant(
        "clipping by the norm of each rank's own part",
        SHARDED,
        "norm = self._context.sum(total).sqrt().float() / scale",
        "norm = total.sqrt().float() / scale",
        (f"{PARITY}[1x1x2]",),
        "areal-project/AReaL#312",
    ),
    Plant(
        "gradient norm counts replicated parameters on every rank",
        GROUPS,
        "in_grad_norm=(is_split or tp.rank == 0) and not",
        "in_grad_norm=not",
        (f"{PARITY}[2x1x1]",),
    ),
    Plant(
        "gradient norm counts the tied embedding twice",
        GROUPS,
        "in_grad_norm=(is_split or tp.rank == 0) and not is_tied_copy(name, self.context)",
        "in_grad_norm=is_split or tp.rank == 0",
        (f"{PARITY}[1x2x1]",),
    ),
    Plant(
        "squares of gradients added in fp32 on CPUs",
        "megatron_lite/optim/square_sums.py",
        "for piece in of_tensor], 2, torch.float64)",
        "for piece in of_tensor])\n    norms = [norm.double() for norm in norms]",
        ("tests/train/test_optimizers.py::test_sums_over_millions_of_numbers_are_those_in_fp64",),
    ),
    Plant(
        "averages of the weights every few steps with the decay of one step",
        "megatron_lite/optim/ema.py",
        "self._decay = settings.decay**settings.interval",
        "self._decay = settings.decay",
        ("tests/train/test_averages.py::test_averages_are_those_by_hand",),
    ),
    Plant(
        "loss of fp16 not scaled up, but its gradients scaled down",
        SHARDED,
        '        """Factor of each micro-batch\'s loss before its backward pass: the loss scale of fp16, else 1."""\n'
        "        return float(self.loss_scaler.cur_scale)",
        '        """Factor of each micro-batch\'s loss before its backward pass: the loss scale of fp16, else 1."""\n'
        "        return 1.0",
        (f"{FURTHER}[1x1x2]",),
    ),
    Plant(
        "gradients of fp16 clipped before they are scaled down",
        SHARDED,
        "norm = self._context.sum(total).sqrt().float() / scale",
        "norm = self._context.sum(total).sqrt().float()",
        (f"{FURTHER}[1x1x2]",),
    ),
    Plant(
        "gradients of pipeline stages divided by the micro-batches once too often",
        "megatron_lite/engine/pipeline.py",
        "scale = len(micro_batches) * self._zero.loss_factor",
        "scale = self._zero.loss_factor",
        (f"{FURTHER}[1x2x1]",),
    ),
)

LOSSES = (
    Plant(
        "loss divided by each micro-batch's own tokens",
        "megatron_lite/train/loss_normalizer.py",
        '        if self._normalization == "global_tokens":\n            return 1.0 / max(divisor, 1.0)\n',
        "",
        (SAME_SAMPLES,),
        "PrimeIntellect-ai/prime-rl#583",
    ),
    Plant(
        "cross entropy counts the padding rows of the vocabulary",
        "megatron_lite/transformer/loss.py",
        "    real = logits[:, :valid]\n    chunks",
        "    real = logits\n    chunks",
        ("tests/transformer/test_cross_entropy.py",),
    ),
    Plant(
        "labels of causal language modelling one place late",
        "data_utils/objectives/causal.py",
        "predict_range(row, offset, end, text, 0)",
        "predict_range(row, offset, end - 1, text, 1)",
        (f"{RECIPES}::test_the_text_can_be_rebuilt[causal]",),
        "huggingface/transformers#47394",
    ),
    Plant(
        "weight decay on norms",
        GROUPS,
        'return not (name.endswith("bias") or "layernorm" in name or model_spec(config).is_unused(name, config))',
        'return not (name.endswith("bias") or model_spec(config).is_unused(name, config))',
        ("tests/train/test_engine.py::test_weight_decay_matches_matrices_and_tables",),
    ),
    Plant(
        "weight decay on biases",
        GROUPS,
        'return not (name.endswith("bias") or "layernorm" in name or model_spec(config).is_unused(name, config))',
        'return not ("layernorm" in name or model_spec(config).is_unused(name, config))',
        ("tests/train/test_engine.py::test_weight_decay_matches_matrices_and_tables",),
    ),
    Plant(
        "schedule of the learning rate advanced twice a step",
        TRAINER,
        "        lr = self._phase_plan.learning_rate(step)\n",
        "        lr = self._phase_plan.learning_rate(2 * step)\n",
        ("tests/train/test_events.py::test_the_changes_reach_model_and_optimizer",),
        "huggingface/accelerate#2926",
    ),
    Plant(
        "evaluation with dropout",
        "megatron_lite/engine/plain.py",
        "micro_batch = self.prepared(batch, None)",
        "micro_batch = self.prepared(batch, 1)",
        ("tests/train/test_engine.py::test_an_evaluation_has_no_dropout",),
    ),
)

DROPOUT = (
    Plant(
        "dropout of attention equal on all tensor-parallel ranks",
        "megatron_lite/transformer/micro_batch.py",
        "first_head = config.num_attention_heads // tensor_parallel_size * tensor_parallel_rank",
        "first_head = 0",
        (f"{FURTHER}[2x1x1]",),
        "InternLM/InternLM#405",
    ),
    Plant(
        "dropout of hidden states different on tensor-parallel ranks",
        "megatron_lite/transformer/micro_batch.py",
        "keys = token_keys(seed, batch.samples,",
        "keys = token_keys(seed + tensor_parallel_rank, batch.samples,",
        (f"{FURTHER}[2x1x1]",),
        "NVIDIA/Megatron-LM#206",
    ),
    Plant(
        "dropout drawn by the place in the micro-batch, not by the sample",
        "megatron_lite/train/step.py",
        "else Batch(loaded, samples)",
        "else Batch(loaded)",
        (SAME_SAMPLES,),
        "pytorch/pytorch#5059",
    ),
    Plant(
        "masks drawn by the place in the batch, not by the sample",
        "data_utils/objectives/compiled.py",
        "seed_rng(tables.rng, settings.key, chunks.samples[i], document, 0)",
        "seed_rng(tables.rng, settings.key, i, document, 0)",
        (f"{RECIPES}::test_a_sample_is_the_same_in_any_batch_and_differs_by_number_and_seed[t5]",),
        "pytorch/pytorch#5059",
    ),
    Plant(
        "recomputation draws other dropout than the forward pass",
        "megatron_lite/transformer/kernels/dropout.py",
        "        return FeatureDropout(self.keys, int(salts(len(self.salts) - 1)[layer, SITES.index(site)]), p)",
        "        seen = self.__dict__.setdefault('seen', [])\n        seen.append(site)\n"
        "        salt = int(salts(len(self.salts) - 1)[layer, SITES.index(site)])\n"
        "        return FeatureDropout(self.keys, salt ^ len(seen), p)",
        (
            "tests/train/test_parity.py::test_recomputation_repeats_dropout_bit_for_bit"
            "[2x1x1-zero2-none-accumulation1-sp-dropout]",
        ),
    ),
)

SAMPLES = (
    Plant(
        "all data-parallel ranks take the same samples",
        "data_utils/loader/mixture.py",
        "return samples.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]",
        "return samples.reshape(-1, dp_size, micro_batch_size)[:, 0]",
        ("tests/data/loader/test_mixture.py::test_ranks_and_micro_batches_share_the_step_exactly",),
    ),
    Plant(
        "`max_epochs` judged one sample early",
        "data_utils/loader/epoch_caps.py",
        "[-1].epochs(int(counts[-1]))",
        "[-1].epochs(int(counts[-1]) - 1)",
        ("tests/data/loader/test_epoch_caps.py::test_all_text_of_a_short_run_may_be_read",),
    ),
    Plant(
        "a step trained twice after a resume",
        TRAINER,
        "progress.step, progress.consumed_samples = state.step,",
        "progress.step, progress.consumed_samples = state.step - 1,",
        (RESUMED,),
        "thinking-machines-lab/tinker-cookbook#935",
    ),
    Plant(
        "every epoch in the same order",
        "data_utils/loader/sampler.py",
        "count, derive_key(seed, corpus + 1, epochs[i]))",
        "count, derive_key(seed, corpus + 1, 0))",
        (EPOCHS,),
    ),
    Plant(
        "a window repeated where an epoch begins",
        "data_utils/loader/sampler.py",
        "windows[i] = permute(ordinals[i] % count, count,",
        "windows[i] = permute(min(max(ordinals[i] % count, 1), count - 1), count,",
        (EPOCHS,),
    ),
    Plant(
        "the last window of an epoch skipped",
        "data_utils/loader/sampler.py",
        "self.num_windows = -(-self.cost // window_length)",
        "self.num_windows = max(1, self.cost // window_length)",
        ("tests/data/loader/test_sampler.py::test_windows_cover_every_token_once",),
    ),
    Plant(
        "the order of blocks repeats after the first",
        "data_utils/loader/sampler.py",
        "samples_before[corpus] + block * (starts[corpus + 1] - starts[corpus]) + block_ranks[position]",
        "samples_before[corpus] + block_ranks[position]",
        ("tests/data/loader/test_mixture.py",),
    ),
    Plant(
        "Adam's count of steps not restored",
        ENGINE,
        'self._zero.step_count(parameter).fill_(others.get(name, state["adam_step"]))',
        "self._zero.step_count(parameter).fill_(0.0)",
        (RESUMED,),
        "deepspeedai/DeepSpeed#4396",
    ),
    Plant(
        "Q, K and V cut as one matrix when a checkpoint changes its tensor-parallel size",
        "megatron_lite/checkpoint/shard_slices.py",
        "bounds = [0, *accumulate(partition.block_rows(rows))] if partition.dim == 0 else [0, rows]",
        "bounds = [0, rows]",
        ("tests/checkpoint/test_checkpoint.py::test_state_is_bit_equal_on_any_layout",),
        "predibase/lorax#120",
    ),
)

ROWS = (
    Plant(
        "a token sees the one after it",
        "megatron_lite/transformer/attention_backends/layout.py",
        "seen = time <= bound",
        "seen = time <= bound + 1",
        (VIEWS,),
    ),
    Plant(
        "the query stream sees the token that it predicts",
        "megatron_lite/transformer/attention_backends/layout.py",
        "query_bound=np.where(step >= 0, step, -step - 1)",
        "query_bound=np.where(step >= 0, step, -step)",
        (VIEWS,),
    ),
    Plant(
        "attention across the documents of a row",
        "megatron_lite/transformer/attention_backends/layout.py",
        "document = batch_index // doc.shape[1] * (flat_doc.max(initial=0) + 1) + flat_doc[batch_index]",
        "document = batch_index // doc.shape[1]",
        (VIEWS,),
        "axolotl-ai-cloud/axolotl#3796",
    ),
    Plant(
        "positions not restarted in each document of a row",
        "data_utils/objectives/causal.py",
        "count_up(row[POSITION_IDS], offset, end, 0)",
        "count_up(row[POSITION_IDS], offset, end, offset)",
        (f"{RECIPES}::test_the_text_can_be_rebuilt[causal]",),
        "huggingface/nanoVLM#204",
    ),
    Plant(
        "positions begin with 1",
        "data_utils/objectives/causal.py",
        "count_up(row[POSITION_IDS], offset, end, 0)",
        "count_up(row[POSITION_IDS], offset, end, 1)",
        (f"{RECIPES}::test_the_text_can_be_rebuilt[causal]",),
    ),
    Plant(
        "positions within a span begin with 0",
        WRITE,
        "count_up(row[BLOCK_POSITION_IDS], at, end, 1)",
        "count_up(row[BLOCK_POSITION_IDS], at, end, 0)",
        ("tests/data/objectives/test_blank_infilling.py::test_worked_example_of_two_spans",),
    ),
    Plant(
        "positions within spans count on from span to span",
        WRITE,
        "count_up(row[BLOCK_POSITION_IDS], at, end, 1)",
        "count_up(row[BLOCK_POSITION_IDS], at, end, at - part_b + 1)",
        ("tests/data/objectives/test_blank_infilling.py::test_worked_example_of_two_spans",),
    ),
    Plant(
        "position of a span is that of the token after its mask",
        WRITE,
        "scratch.mask_at[i] = at - offset\n",
        "scratch.mask_at[i] = at - offset + 1\n",
        ("tests/data/objectives/test_blank_infilling.py::test_worked_example_of_two_spans",),
    ),
    Plant(
        "spans of Poisson(lambda) lengths one token longer (GLM)",
        "data_utils/objectives/blank_infilling/config.py",
        "math.lgamma(length + 1) for length in lengths",
        "math.lgamma(length) for length in lengths",
        (
            "tests/data/objectives/test_blank_infilling_distributions.py"
            "::test_span_lengths_are_truncated_poisson",
        ),
    ),
    Plant(
        "spans of Poisson(lambda) lengths one token shorter (BART)",
        "data_utils/objectives/bart.py",
        "weights = np.cumprod(self.mean_span_length / np.arange(1, LONGEST_SPAN + 1))",
        "weights = np.cumprod(self.mean_span_length / np.arange(2, LONGEST_SPAN + 2))",
        ("tests/data/objectives/test_masking.py::test_barts_lengths_are_poissons_without_zero",),
    ),
    Plant(
        "masks, random tokens and kept tokens as 80/20/0",
        "data_utils/objectives/masking.py",
        "return RANDOM_TOKEN if word < settings.mask_or_random_below else KEEP",
        "return RANDOM_TOKEN",
        ("tests/data/objectives/test_masking.py::test_spanbert_treats_a_span_as_one_and_masks_whole_words",),
    ),
    Plant(
        "ids of RoBERTa's positions one too small in an export",
        "megatron_lite/hf/common/system_table.py",
        "return replace(self, skipped_positions=pad_token_id + 1)",
        "return replace(self, skipped_positions=pad_token_id)",
        ("tests/outside/test_directory_alone.py::test_a_directory_alone_computes_what_was_trained",),
        "huggingface/sentence-transformers#3879",
    ),
)

WIDTHS = (
    Plant(
        "rates of matrices that do not follow the width under muP",
        "megatron_lite/optim/lr_multipliers.py",
        "lr_factor=multipliers.lr_factor * (m**-0.5 if is_relative or is_orthogonal else 1 / m),",
        "lr_factor=multipliers.lr_factor,",
        ("tests/train/test_mup.py",),
    ),
    Plant(
        "logits that are not divided by the width under muP",
        "megatron_lite/transformer/lm_head.py",
        "config.hidden_size**-0.5 if config.scale_head else 1 / config.width_ratio",
        "config.hidden_size**-0.5 if config.scale_head else 1.0",
        ("tests/train/test_mup.py",),
    ),
    Plant(
        "initial values of matrices that do not follow the width under muP",
        "megatron_lite/transformer/init.py",
        "std *= config.width_ratio**-0.5 if is_hidden(name) else 1.0",
        "std *= 1.0",
        ("tests/train/test_mup.py",),
    ),
)

INSIDE = (
    Plant(
        "importance of a head with its sign, so that examples cancel",
        "megatron_lite/analysis/heads.py",
        "sums[name] += gradient.abs().sum(0).double()",
        "sums[name] += gradient.sum(0).abs().double()",
        ("tests/analysis/test_heads.py",),
    ),
    Plant(
        "self-similarity of a word that counts each context with itself",
        "megatron_lite/analysis/contextuality.py",
        "return (total - count) / (count * count - count)",
        "return total / (count * count)",
        ("tests/analysis/test_contextuality.py",),
    ),
    Plant(
        "Llama's norms of heads in their own order of features",
        "megatron_lite/hf/published/llama.py",
        'TensorRule("attention.head_norms.key_layernorm", ("self_attn.k_norm",), ROTATE_HALF),',
        'TensorRule("attention.head_norms.key_layernorm", ("self_attn.k_norm",)),',
        ("tests/hf/test_published_modern.py", "tests/hf/test_published.py"),
    ),
    Plant(
        "NeoBERT's queries, keys and values of all heads apart",
        "megatron_lite/hf/published/neobert.py",
        "x.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)",
        "x.unflatten(0, (3, config.num_attention_heads, -1)).flatten(0, 2)",
        ("tests/hf/test_published_neobert.py",),
    ),
    Plant(
        "norms of heads whose scales each rank trains for itself",
        "megatron_lite/transformer/norms.py",
        "[self.parallel.copy(norm.weight) for",
        "[norm.weight for",
        (f"{FURTHER}[2x2x1]",),
    ),
    Plant(
        "RMSNorm's gradient without its part along the input",
        "megatron_lite/transformer/norms.py",
        "torch.addcmul(normed.mul_(along), gradient, wide)",
        "gradient * wide",
        ("tests/transformer/test_norms.py",),
    ),
    Plant(
        "Muon's steps have one size for all shapes",
        "megatron_lite/optim/muon.py",
        "math.sqrt(max(index.tensors[owned.tensor].shape))",
        "math.sqrt(max(index.tensors[slices[0].tensor].shape))",
        ("tests/train/test_optimizers.py",),
    ),
)

ELECTRA = (
    Plant(
        "a draw that is the text's token counts as replaced",
        "megatron_lite/models/electra/model.py",
        "is_new = (masked_weights > 0) & (drawn != batch.targets)",
        "is_new = masked_weights > 0",
        (f"{PAIR}::test_the_golden_row",),
    ),
    Plant(
        "a token is called replaced from the logit 0.5 on",
        "megatron_lite/models/electra/model.py",
        "is_new, is_called_new = label > 0, scores > 0",
        "is_new, is_called_new = label > 0, scores > 0.5",
        (f"{PAIR}::test_the_golden_row",),
    ),
    Plant(
        "each shard of the vocabulary draws from the noise of the first",
        "megatron_lite/models/electra/sampling.py",
        "gumbel(seed, samples[part], positions[part], first, count)",
        "gumbel(seed, samples[part], positions[part], 0, count)",
        (f"{DRAWS}::test_every_split_of_the_vocabulary_draws_the_same",),
    ),
    Plant(
        "draws that do not depend on the sample",
        "megatron_lite/models/electra/sampling.py",
        "[blocks[None], positions.long()[:, None], *words], (seed & _LOW, seed >> 32 & _LOW)",
        "[blocks[None], positions.long()[:, None], *(0 * word for word in words)], (seed & _LOW, seed >> 32 & _LOW)",
        (f"{DRAWS}::test_the_noise_depends_on_seed_sample_and_position",),
    ),
    Plant(
        "the discriminator's tokens keep their weights when a step's losses become means",
        "megatron_lite/models/electra/batch.py",
        "np.full(len(order), REPLACED.number)",
        "np.full(len(order), MASKED.number)",
        (f"{PAIR}::test_losses_and_gradients_match_the_classes",),
    ),
    Plant(
        "a generator with a table of positions of its own",
        "megatron_lite/models/electra/model.py",
        '("word_embeddings", "position_embeddings", "segment_embeddings", "layernorm")',
        '("word_embeddings", "segment_embeddings", "layernorm")',
        (f"{PAIR}::test_losses_and_gradients_match_the_classes",),
    ),
)

LORA = (
    Plant(
        "LoRA's updates multiplied as those of rsLoRA",
        "megatron_lite/config/lora.py",
        "(self.rank**0.5 if self.rank_stabilized else self.rank)",
        "self.rank**0.5",
        (UPDATE,),
    ),
    Plant(
        "dropout of LoRA on the input of the frozen layer too",
        TENSOR,
        "product = product + self.lora(x, lora_dropout, whole_rows)",
        "site = next(iter(self.lora.values())).site\n"
        "            product = linear(site.dropped(x, lora_dropout), self.weight, bias)\n"
        "            product = product + self.lora(x, lora_dropout, whole_rows)",
        (UPDATE,),
    ),
    Plant(
        "B of LoRA's updates drawn at random",
        "megatron_lite/transformer/init.py",
        'name.endswith("bias") or (LORA in name and name.endswith(".b"))',
        'name.endswith("bias")',
        (UPDATE,),
    ),
    Plant(
        "no weight decay on A of LoRA's updates",
        GROUPS,
        'return not (name.endswith("bias") or',
        'return not (name.endswith(("bias", ".a")) or',
        ("tests/hf/test_lora.py::test_training_and_files_are_pefts[bert-1]",),
    ),
    Plant(
        "gradient of A not summed over the tensor-parallel ranks that have the rows of B",
        "megatron_lite/transformer/lora.py",
        "return linear(self.parallel.copy(inner) * self.site.settings.scale, self.b)",
        "return linear(inner * self.site.settings.scale, self.b)",
        (UPDATE,),
    ),
    Plant(
        "updates of Q, K and V on one another's rows",
        "megatron_lite/transformer/lora.py",
        "sizes = list(zip(PARTS[path], partition.block_rows(rows), strict=True))",
        "sizes = list(zip(PARTS[path][::-1], partition.block_rows(rows), strict=True))",
        (UPDATE,),
    ),
    Plant(
        "an export merges LoRA's updates without their scale",
        "megatron_lite/hf/common/lora.py",
        "return weight + (product.T if module.is_transposed else product) * settings.scale",
        "return weight + (product.T if module.is_transposed else product)",
        (UPDATE,),
    ),
)

PROCESSES = (
    Plant(
        "a second start goes on in the directory of a run that trains",
        "megatron_lite/runtime/lease.py",
        "    if locked is False:\n        raise LeaseError",
        "    if False:\n        raise LeaseError",
        ("tests/train/test_lease.py::test_a_killed_holder_does_not_keep_the_lease",),
    ),
    Plant(
        "a holder on another machine counts as dead because its lock is not seen",
        "megatron_lite/runtime/lease.py",
        "locked = False if _is_renewed(path, descriptor) else _lock(descriptor)",
        "locked = _lock(descriptor)",
        ("tests/train/test_lease.py::test_a_living_holder_on_another_machine_is_seen_by_its_renewals",),
    ),
    Plant(
        "the rank that has died is not named",
        "megatron_lite/runtime/watchdog.py",
        "if beat.section != Section.EXIT and beat.process_has_died]",
        "if False]",
        ("tests/train/test_watchdog.py::test_a_rank_that_is_killed_is_named",),
    ),
)

PLANTS = (
    *GRADIENTS, *LOSSES, *DROPOUT, *SAMPLES, *ROWS, *WINDOWS, *WIDTHS, *INSIDE, *OBJECTIVES, *STREAMS, *ELECTRA,
    *KERNELS, *POSITIONS, *LORA, *PROCESSES, *EMBEDDINGS, *MIXTURES, *BENCHMARKS,
)  # fmt: skip
