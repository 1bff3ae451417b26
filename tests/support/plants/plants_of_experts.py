"""Planted bugs of mixtures of experts and of multi-token prediction."""

from __future__ import annotations

from support.plants.plant import Plant

ROUTER, EXPERTS = "megatron_lite/transformer/router.py", "megatron_lite/transformer/experts.py"
ROUTED = "megatron_lite/transformer/routed_tokens.py"
LAYER, RUN = "tests/transformer/test_experts.py", "tests/train/test_experts.py"
LOSSES = f"{LAYER}::test_losses_are_means_of_sequences_without_padding"
CLASS = f"{LAYER}::test_outputs_and_gradients_are_those_of_the_class"
COUNTS = f"{LAYER}::test_a_model_counts_the_tokens_of_its_batch"
LAYOUT = f"{RUN}::test_a_run_does_not_depend_on_the_layout"
UPCYCLING = "tests/checkpoint/test_upcycling.py"
NORMALIZER, MULTI_TOKEN = "megatron_lite/train/loss_normalizer.py", "megatron_lite/transformer/multi_token.py"
WEIGHT = "tests/transformer/test_multi_token.py::test_its_weight_is_of_the_mean_over_the_step"
FORMULA = "tests/transformer/test_multi_token.py::test_loss_and_gradients_are_those_of_the_formula"
FURTHER = "tests/train/test_parity.py::test_some_further_cases_equal_one_process"

MIXTURES = (
    Plant(
        "the router's losses divided by the micro-batches of a rank, not of all",
        "megatron_lite/train/loss_normalizer.py",
        "step_share=1.0 / count",
        "step_share=1.0 / len(inputs)",
        (LAYOUT,),
    ),
    Plant(
        "the router's losses without a gradient",
        ROUTER,
        "return grad, torch.ones((), device=grad.device), None, None",
        "return grad, torch.zeros((), device=grad.device), None, None",
        (LOSSES,),
    ),
    Plant(
        "the coefficient of the balance loss not applied",
        ROUTER,
        "loss = (settings.balance_loss * balance +",
        "loss = (balance +",
        (LOSSES,),
    ),
    Plant(
        "the router's losses larger with more tensor-parallel ranks",
        ROUTER,
        ".sum() * routed.factor",
        ".sum() * routed.factor * self.parallel.group.size",
        (f"{FURTHER}[2x2x1]",),
        "NVIDIA/Megatron-LM#5047",
    ),
    Plant(
        "the router's losses without the loss scale of fp16",
        ROUTED,
        "share, share * loss_scale)",
        "share, share)",
        (f"{FURTHER}[1x1x2]",),
    ),
    Plant(
        "counts of a block that is computed again taken twice",
        ROUTER,
        "ctx.sums, ctx.add = sums, add\n",
        "ctx.sums, ctx.add = sums, add\n        add(sums)\n",
        (LOSSES,),
    ),
    Plant(
        "padding counted among the tokens of experts",
        ROUTED,
        "(sequence == numbers[:, None])",
        "(sequence.clamp(min=0) == numbers[:, None])",
        (LOSSES, COUNTS),
    ),
    Plant(
        "biases moved by the counts of a rank alone",
        ROUTER,
        "if group.size > 1:",
        "if False:",
        (LAYOUT,),
    ),
    Plant(
        "biases moved in a direction that enlarges loads",
        ROUTER,
        "(counts.mean() - counts).sign()",
        "(counts - counts.mean()).sign()",
        (f"{FURTHER}[1x1x2e2]",),
    ),
    Plant(
        "the bias of an expert in the weight of its output",
        ROUTER,
        "gates = scores.gather(1, experts)",
        "gates = ranked.gather(1, experts)",
        (CLASS,),
    ),
    Plant(
        "gradients of the router's weights not summed under tensor parallelism",
        EXPERTS,
        "gates = self.parallel.copy(choice.gates)",
        "gates = choice.gates",
        (f"{FURTHER}[2x2x1]",),
    ),
    Plant(
        "gradients of experts summed over all data-parallel ranks",
        "megatron_lite/engine/parameter_groups.py",
        "holders=self.context.edp if EXPERTS in name and self.context.ep.size > 1 else None",
        "holders=None",
        (f"{FURTHER}[1x1x2e2]",),
    ),
    Plant(
        "the experts of rank 0 sent to all ranks at the start",
        "megatron_lite/engine/deepspeed_engines.py",
        "def _broadcast_model(self)",
        "def _broadcast_nothing(self)",
        (f"{FURTHER}[1x1x2e2]",),
    ),
    Plant(
        "outputs of experts returned in the order of experts, not of ranks",
        EXPERTS,
        "for of_rank in zip(*outputs, strict=True) for part in of_rank",
        "for of_expert in outputs for part in of_expert",
        (f"{FURTHER}[1x1x2e2]",),
    ),
    Plant(
        "the copies of a dense FFN added to the experts' whole initial weights",
        "megatron_lite/train/resume.py",
        "mul_(config.checkpoint.upcycling_noise)",
        "mul_(1.0)",
        (f"{UPCYCLING}::test_the_first_loss_is_that_of_the_dense_model",),
    ),
    Plant(
        "the loss of further tokens scaled by the ranks",
        NORMALIZER,
        "weight * max(divisor, 1.0) /",
        "weight / 2 * max(divisor, 1.0) /",
        (WEIGHT,),
        "NVIDIA/Megatron-LM#3959",
    ),
    Plant(
        "the loss of further tokens summed, not averaged",
        NORMALIZER,
        "scales[MTP.number] = weight * max(divisor, 1.0) / max(totals[MTP.number], 1.0)",
        "scales[MTP.number] = weight * max(divisor, 1.0)",
        (WEIGHT,),
        "NVIDIA/Megatron-LM#1532",
    ),
    Plant(
        "further tokens counted among those that divide the loss",
        NORMALIZER,
        "(loss_divisors[MTP.number] if self._has_further else 0.0)",
        "0.0",
        (WEIGHT,),
    ),
    Plant(
        "the loss of further tokens added twice",
        "megatron_lite/transformer/transformer.py",
        "loss + further_loss,",
        "loss + 2 * further_loss,",
        (FORMULA,),
    ),
    Plant(
        "the loss of further tokens shown in the loss, too",
        "megatron_lite/telemetry/reports.py",
        "losses[is_main].sum()",
        "losses.sum()",
        (WEIGHT,),
    ),
    Plant(
        "further tokens predicted across the end of a document",
        "megatron_lite/transformer/batch.py",
        "has_next = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] != PADDING_DOC)",
        "has_next = doc[:, 1:] != PADDING_DOC",
        (FORMULA,),
    ),
    Plant(
        "further tokens predicted from the hidden state before the final norm",
        MULTI_TOKEN,
        "            hidden = norm(hidden)\n",
        "            pass\n",
        (FORMULA,),
    ),
    Plant(
        "the gradient of the final norm not summed over ranks with other tokens",
        MULTI_TOKEN,
        "name: copy_to_group(p, group) for",
        "name: p for",
        (f"{FURTHER}[2x2x1]",),
    ),
    Plant(
        "gradients of the words on the last stage not summed with those of the first",
        "megatron_lite/engine/parameter_groups.py",
        "name == TIED and has_words_on_last_stage(self.config.model)",
        "name == TIED and self.config.model.tie_word_embeddings",
        (f"{FURTHER}[2x2x1]",),
    ),
)
