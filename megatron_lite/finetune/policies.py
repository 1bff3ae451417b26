"""Policies of fine-tuning: which parameters are trained, from which step on, and with which learning-rate multiplier.

The depth of a parameter orders them: embeddings 0, block i (from 0) i + 1, all above the blocks one more than the last.
What blocks share (`model.share_layers`) has depth 1.

Source: discriminative lr_multipliers and gradual unfreezing: ULMFiT, arXiv:1801.06146; layer-wise decay: ELECTRA,
arXiv:2003.10555; biases alone: BitFit, arXiv:2106.10199; adapters: arXiv:1902.00751; the order of unfreezing and the
auxiliary loss of SiATL: arXiv:1902.10547.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from data_utils.common.errors import ConfigError
from data_utils.common.settings import check
from megatron_lite.checkpoint.manifest import ADAPTER, TASK_HEAD
from megatron_lite.config.lora import LORA
from megatron_lite.config.tree import Config
from megatron_lite.optim.lr_multipliers import NEVER, LrMultipliers
from megatron_lite.transformer.build import model_spec

_ABOVE = ("heads.", "final_layernorm.")

# `finetune.trained` -> names of the parameters to train, beside the head that the task adds.
_CHOSEN: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "biases": lambda name: name.endswith("bias"),
    "adapters": lambda name: ADAPTER in name or "layernorm" in name,
    "lora": lambda name: LORA in name,
    "head": lambda name: False,
}


def lr_multipliers(config: Config, names: Iterable[str], samples: int) -> dict[str, LrMultipliers]:
    """Parameter name -> its learning-rate multiplier and first step; {} if all are trained alike.

    Args:
        names: of all parameters of the whole model.
        samples: of an epoch.
    Raises: ConfigError if no parameter is trained.
    """
    finetune, names = config.finetune, list(names)
    top = depth(TASK_HEAD, config)
    chosen = _CHOSEN[finetune.trained]
    # Heads that no loss reads have no gradient, and weight decay alone would change them.
    used = [name for name in names if not model_spec(config).is_unused(name, config)]
    trained = [name for name in used if chosen(name) or name.startswith(TASK_HEAD)]
    if not trained:
        assert config.task is not None
        raise ConfigError(
            f"finetune.trained is {finetune.trained}, which selects no parameter: a task of kind "
            f"{config.task.kind} adds no head; set finetune.trained to all."
        )
    check(
        finetune.unfreeze != "siatl" or any(name.startswith(TASK_HEAD) for name in trained),
        "finetune.unfreeze is siatl, which first trains only the new head, but the task adds none; set it to all "
        "or gradual.",
    )
    # All parameters of one rate share buckets: without policies there is nothing to group.
    if (finetune.layer_decay, finetune.trained, finetune.unfreeze) == (1.0, "all", "all"):
        return {}
    per_step = config.batch.global_batch_size

    def rate(name: str) -> LrMultipliers:
        below = top - depth(name, config)  # layers from the head
        epoch = 1
        if finetune.unfreeze == "gradual":
            epoch = max(1, below)
        elif finetune.unfreeze == "siatl" and not name.startswith(TASK_HEAD):
            epoch = 2 if below < top else 5
        return LrMultipliers(finetune.layer_decay**below, first_step_of(epoch, samples, per_step))

    return {name: LrMultipliers(first_step=NEVER) for name in names} | {name: rate(name) for name in trained}


def depth(name: str, config: Config) -> int:
    """Depth of a parameter, as describe_trained at the head of this file."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    if name.startswith("encoder_layernorm."):
        return config.model.num_layers
    # A block that all layers share is trained as one.
    blocks = 1 if config.model.share_layers == "all" else config.model.total_layers
    return blocks + 1 if name.startswith(_ABOVE) else 0


def first_step_of(epoch: int, samples: int, per_step: int) -> int:
    """The first step all of whose samples are of this epoch or later ones. Args: epoch: from 1."""
    return math.ceil((epoch - 1) * samples / per_step) + 1


def language_weight(config: Config, samples: int) -> Callable[[int], float] | None:
    """Step, from 1 -> the weight of the language model's loss beside the task's; None: there is no such loss.

    From `lm_weight` in the first epoch by equal factors to `lm_weight_last` in epoch `lm_weight_epochs`; then it stays.

    Args: samples: of an epoch.
    """
    settings, per_step = config.finetune, config.batch.global_batch_size
    if not settings.lm_weight:
        return None
    last = settings.lm_weight if settings.lm_weight_last is None else settings.lm_weight_last

    def weight(step: int) -> float:
        epoch = (step - 1) * per_step // samples  # from 0, of the step's first sample
        share = min(1.0, epoch / (settings.lm_weight_epochs - 1))
        return settings.lm_weight * (last / settings.lm_weight) ** share

    return weight


def describe_trained(lr_multipliers: dict[str, LrMultipliers], elements: dict[str, int], steps: int) -> str:
    """One line for the log. Args: elements: of each parameter. steps: of the run."""
    trained = {name for name, rate in lr_multipliers.items() if rate.is_trained(steps)}
    starts = sorted({lr_multipliers[name].first_step for name in trained})
    share = sum(elements[name] for name in trained)
    total = sum(elements.values())
    line = f"trained: {share:,} of {total:,} numbers in {len(trained)} of {len(lr_multipliers)} parameters"
    return line if len(starts) == 1 else f"{line}, starting at steps {', '.join(map(str, starts))}"
