"""The section `finetune`: training of a checkpoint on a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from data_utils.common.setting_files import shown
from data_utils.common.settings import check, checked, fraction, setting


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("finetune")
class FinetuneConfig:
    on_resume: ClassVar[str] = "free"

    epochs: int = setting(3, "Passes over the training samples; determines training.steps.", at_least=1)
    warmup_share: float = fraction(0.1, "Fraction of the steps used for learning rate warmup.")
    seeds: tuple[int, ...] = setting(
        (), "One run per seed (initial heads, sample order, dropout); [] = training.seed only."
    )
    evaluations_per_epoch: int = setting(1, "Evaluations on the validation files per epoch.", at_least=1)
    best: str | None = setting(
        None,
        "Metric that selects the best checkpoint; null = mean of the task's main metrics.",
    )
    patience: int | None = setting(
        None,
        "Early stopping: stop after this many evaluations without improvement; null = never.",
        at_least=1,
    )
    tasks_alpha: float = fraction(
        1.0, "Several tasks: batches per epoch in proportion to (batches of the task)^tasks_alpha; 0 = equal."
    )
    trained: str = setting(
        "all",
        "Parameters trained in addition to the new task head: all, biases (BitFit), adapters (with "
        "model.adapter_size; LayerNorms too), lora (with model.lora) or head (none).",
        one_of=("all", "biases", "adapters", "head", "lora"),
    )
    unfreeze: str = setting(
        "all",
        "all = train everything from the first step; gradual = head and top block in epoch 1, one more "
        "block per epoch, then the embeddings (ULMFiT); siatl = head only, blocks from epoch 2, embeddings "
        "from epoch 5.",
        one_of=("all", "gradual", "siatl"),
    )
    layer_decay: float = setting(
        1.0,
        "Layer-wise learning rate decay: lr x layer_decay^d with d = 0 for the head, 1 for the top block, "
        "num_layers + 1 for the embeddings (ULMFiT 1/2.6 = 0.385, XLNet 0.75, ELECTRA 0.8).",
        above=0,
        at_most=1,
    )
    lm_weight: float = setting(
        0.0,
        "Weight of the run's pretraining loss on the samples' texts, added to the loss of a task head "
        "(SiATL: 0.2); 0 = off.",
        at_least=0,
    )
    lm_weight_last: float | None = setting(
        None,
        "Value that lm_weight reaches in epoch lm_weight_epochs (SiATL: 0.1); null = constant lm_weight.",
        above=0,
    )
    lm_weight_epochs: int = setting(
        15, "Epochs over which lm_weight decays geometrically to lm_weight_last.", at_least=2
    )

    def __post_init__(self) -> None:
        check(
            self.trained != "head" or not self.lm_weight,
            f"finetune.lm_weight is {self.lm_weight}, but finetune.trained head freezes the language model; "
            "set lm_weight to 0, or train more parameters.",
        )
        for seed in self.seeds:
            check(
                0 <= seed < 2**63,
                f"finetune.seeds contains {shown(seed)}; a seed must be an integer from 0 to 2^63 - 1.",
            )
        check(
            len(set(self.seeds)) == len(self.seeds),
            f"finetune.seeds ({', '.join(map(str, self.seeds))}) contains a duplicate; each seed is one run.",
        )
