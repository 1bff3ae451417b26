"""The section `finetune`: training of a checkpoint on a task."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.setting_files import shown
from data_utils.common.settings import check, checked, fraction, setting


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("finetune")
class FinetuneConfig:
    epochs: int = setting(3, "passes over the training samples; training.steps follows from it", at_least=1)
    warmup_share: float = fraction(0.1, "part of the steps in which the learning rate rises")
    seeds: tuple[int, ...] = setting(
        (), "a run for each, of initial heads, order and dropout; () = training.seed"
    )
    evaluations_per_epoch: int = setting(1, "evaluations on the validation files in each epoch", at_least=1)
    best: str | None = setting(
        None,
        "the metric by which the best checkpoint is kept; null = the mean of those that the task is known by",
    )
    patience: int | None = setting(
        None, "evaluations without a better one after which the training ends; null = never", at_least=1
    )
    tasks_alpha: float = fraction(
        1.0, "several tasks: their batches in an epoch ~ batches of their samples ^ tasks_alpha; 0 = equal"
    )
    trained: str = setting(
        "all",
        "which parameters are trained beside the head that the task adds: all, biases (BitFit), adapters (of "
        "model.adapter_size, and LayerNorms), or head: none; lora is refused",
        one_of=("all", "biases", "adapters", "head", "lora"),
    )
    unfreeze: str = setting(
        "all",
        "all: from the first step on; gradual: the head and the top block in the first epoch, one block more downwards "
        "in each further epoch, then the embeddings (ULMFiT); siatl: the head alone, from epoch 2 on the blocks, from "
        "5 on the embeddings",
        one_of=("all", "gradual", "siatl"),
    )
    layer_decay: float = setting(
        1.0,
        "factor of the learning rate for each layer down from the head: lr x layer_decay^d, with d 0 for the head, 1 "
        "for the top block, num_layers + 1 for the embeddings (ULMFiT 1/2.6 = 0.385, XLNet 0.75, ELECTRA 0.8)",
        above=0,
        at_most=1,
    )
    lm_weight: float = setting(
        0.0,
        "weight of the run's own objective on the texts of the samples, beside the loss of a task with a head (SiATL: "
        "0.2); 0 = none",
        at_least=0,
    )
    lm_weight_last: float | None = setting(
        None, "what lm_weight has become in epoch lm_weight_epochs (SiATL: 0.1); null = it stays", above=0
    )
    lm_weight_epochs: int = setting(
        15, "the epochs in which lm_weight becomes lm_weight_last, by equal factors", at_least=2
    )

    def __post_init__(self) -> None:
        check(
            self.trained != "lora",
            "finetune.trained is lora, which is not here; use PEFT on an exported model (docs/huggingface.md), or set "
            "it to adapters.",
        )
        check(
            self.trained != "head" or not self.lm_weight,
            f"finetune.lm_weight is {self.lm_weight} with finetune.trained head, so nothing that the language model is "
            "made of is trained; set it to 0, or train more.",
        )
        for seed in self.seeds:
            check(
                0 <= seed < 2**63,
                f"finetune.seeds has {shown(seed)}; a seed must be a whole number from 0 to 2^63 - 1.",
            )
        check(
            len(set(self.seeds)) == len(self.seeds),
            f"finetune.seeds ({', '.join(map(str, self.seeds))}) names a seed twice; each is one run.",
        )
