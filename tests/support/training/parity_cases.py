"""The list of layouts and settings that are compared with one process: support/parity.py runs them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from support.transformer.batches import prefix_batch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, ORD, POSITION_IDS, SEGMENT_IDS
from data_utils.common.settings import build
from data_utils.objectives import LOSSES
from megatron_lite.config.sections import OPTIMIZERS as KINDS_OF_OPTIMIZER
from megatron_lite.config.tree import Config
from megatron_lite.transformer.batch import Batch

MAX_RANKS = 8
SAMPLES = 32  # of a step: 8 data-parallel ranks x 4 micro-batches
STEPS = 3
OBJECTIVES = 3
VOCAB_SIZE = 500
ROW_LENGTH = 48
LR, CLIP = 1e-2, 0.3
OTHERS = tuple(kind for kind in KINDS_OF_OPTIMIZER if kind != "adamw")
KINDS = ("loss", "norm", "gradients", "weights")

# Largest difference of a tensor's elements over its largest element. fp32: rounding is 6e-8 and sums of about a hundred
# terms in another order give 1e-6 (measured: at most 4e-6), while an error of method gives 1e-3 and more (a factor, a
# missing term, a step without weight decay). Half precision has 8 and 11 bits; its errors add up over four blocks, and
# the largest element of a tensor collects the worst of them. Measured: half of these at most.
TOLERANCES = {
    "fp32": dict.fromkeys(KINDS, 1e-5),
    "bf16": {"loss": 1e-3, "norm": 1e-2, "gradients": 0.2, "weights": 0.2},
    "fp16": {"loss": 1e-4, "norm": 2e-3, "gradients": 0.02, "weights": 0.02},
}


_UPDATES = {"rank": 3, "alpha": 24.0, "dropout": 0.2}
# Options of the model that other systems have, together where one run can have them.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "post-norm": {
        "norm": "post", "embedding_norm": True, "activation": "gelu_erf", "segments": 1, "head_transform": True,
        "head_bias": True, "scale_embedding": True, "init": "plain",
    },
    "rms-norm": {
        "rms_norm": True, "biases": "none", "activation": "relu", "ffn_size": 96, "head_dim": 8, "head_bias": True,
    },
    "glm4": {
        "rms_norm": True, "biases": "qkv", "activation": "silu", "ffn": "gated", "ffn_size": 40, "positions": "rotary",
        "rotary_share": 0.5, "head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "init": "plain",
    },
    "deepnorm": {
        "norm": "deepnorm", "init": "deepnorm", "sandwich_norm": True, "embedding_norm": True, "ffn": "gated",
        "ffn_size": 40, "positions": "rotary",
    },
    "muP": {
        "mup": {"base_hidden_size": 8, "base_head_size": 2}, "head_transform": True, "init_words_std": 0.5,
        "rms_norm": True, "biases": "none",
    },
    "modern GLM": {
        "positions": "rotary", "block_positions": "halves", "rms_norm": True, "ffn": "gated", "ffn_size": 40,
        "biases": "none",
    },
    "modern GLM, local layers": {
        "positions": "rotary", "block_positions": "halves", "rms_norm": True, "ffn": "gated", "ffn_size": 40,
        "biases": "none", "attention_window": 3, "global_every": 3,
    },
    "rotary": {"positions": "rotary"},
    "rotary table": {"positions": "rotary", "block_positions": "table", "rotary_share": 0.5},
    "rotary halves": {"positions": "rotary", "block_positions": "halves", "init_words_std": 0.5},
    "norms of heads": {
        "rms_norm": True, "biases": "none", "activation": "silu", "ffn": "gated", "ffn_size": 40, "positions": "rotary",
        "head_dim": 8, "num_key_value_heads": 4, "query_key_norm": True, "rotary_scaling": [8.0, 1.0, 4.0, 16.0],
        "tie_word_embeddings": False, "head_bias": True, "init": "uniform",
    },
    "local layers": {
        "embedding_norm": True, "first_norm": False, "norm_bias": False, "biases": "none", "activation": "gelu_erf",
        "ffn": "gated", "ffn_size": 40, "positions": "rotary", "rotary_base": 500.0, "rotary_base_local": 20.0,
        "attention_window": 3, "global_every": 2, "head_transform": True, "head_transform_bias": False,
        "head_bias": True, "init_cutoff": 2.0,
    },
    "encoder-decoder": {},  # of GLM's blocks
    "bart": {"norm": "post", "embedding_norm": True, "activation": "gelu_erf", "segments": 2},
    "t5": {"rms_norm": True, "biases": "none", "activation": "relu", "head_dim": 8, "ffn_size": 64},
    "t5 with buckets": {
        "rms_norm": True, "biases": "none", "activation": "relu", "head_dim": 8, "ffn_size": 64, "relative": "buckets",
        "unscaled_scores": True,
    },
    "xlnet": {"norm": "post", "biases": "mlp", "relative": "xlnet", "head_bias": True},
    "xlnet with memory": {
        "norm": "post", "biases": "mlp", "relative": "xlnet", "head_bias": True, "positions": "none",
    },
    "buckets": {"norm": "post", "embedding_norm": True, "relative": "buckets"},
    "disentangled": {
        "norm": "post", "embedding_norm": True, "relative": "disentangled",
        "position_buckets": 8, "position_norm": True,
    },
    "disentangled, own": {"relative": "disentangled", "position_projections": True},
    "lora": {"lora": _UPDATES},
    "lora, parts": {"system": "llama", "ffn_size": 40, "init_words_std": 0.5, "lora": _UPDATES},
    "lora, some parts": {
        "system": "qwen2", "head_dim": 8, "num_key_value_heads": 4, "ffn_size": 40,
        "lora": {**_UPDATES, "targets": ["q_proj", "v_proj", "mlp.up", "down_proj"], "rank_stabilized": True},
    },
    "lora, encoder-decoder": {"system": "bart", "positions": "learned_blocks", "lora": _UPDATES},
    "lora, disentangled": {
        "system": "deberta_v3", "positions": "learned_blocks", "position_buckets": 8, "lora": _UPDATES,
    },
    "experts": {
        "activation_dropout": 0.0, "rms_norm": True, "biases": "none", "activation": "silu", "ffn": "gated",
        "ffn_size": 40, "positions": "rotary",
        "experts": {
            "count": 8, "per_token": 2, "width": 16, "shared": 1, "dense_layers": 1, "groups": 4, "kept_groups": 2,
            "factor": 2.5, "biased": True, "bias_rate": 0.01, "balance_loss": 0.1, "z_loss": 0.05,
        },
    },
    # In half precision rounding changes no choice where all are chosen.
    "experts, all": {"biases": "none", "experts": {"count": 3, "per_token": 3, "width": 24, "z_loss": 1.0}},
    "experts, softmax": {
        "biases": "qkv",
        "experts": {
            "count": 6, "per_token": 3, "width": 24, "scores": "softmax", "normalized": False, "balance_loss": 0.2,
            "z_loss": 0.1,
        },
    },
    "experts, encoder-decoder": {
        "biases": "none",
        "experts": {
            "count": 4, "per_token": 2, "width": 24, "balance_loss": 0.2, "biased": True, "bias_rate": 0.01,
        },
    },
    "MTP": {  # with experts, an untied head and dropout
        "activation_dropout": 0.0, "rms_norm": True, "biases": "qkv", "activation": "silu", "ffn": "gated",
        "ffn_size": 40, "positions": "rotary", "tie_word_embeddings": False, "mtp_layers": 1,
        "experts": {
            "count": 4, "per_token": 2, "width": 16, "shared": 1, "dense_layers": 1, "biased": True,
            "bias_rate": 0.01, "balance_loss": 0.1,
        },
    },
    "MTP, dense": {"rms_norm": True, "positions": "rotary", "mtp_layers": 1},
}  # fmt: skip
MEMORY = "xlnet with memory"
ENCODER_DECODER = (
    "encoder-decoder",
    "bart",
    "t5",
    "t5 with buckets",
    "lora, encoder-decoder",
    "experts, encoder-decoder",
)


def samples_of(step: int, *, has_memory: bool = False) -> np.ndarray:
    """int32 [SAMPLES, fields, ROW_LENGTH]: two documents per row, and later four short ones, for the masked kernel.

    Args: has_memory: whether the first of the tokens that see each other are a memory.
    """
    samples = prefix_batch(
        step, rows=SAMPLES, length=ROW_LENGTH, vocab=VOCAB_SIZE, documents=4 if step else 2
    )
    samples[:, SEGMENT_IDS] = (
        samples[:, POSITION_IDS] % 2
    )  # else XLNet's vectors of segments would have no gradient
    if has_memory:
        samples[:, BLOCK_POSITION_IDS] = (
            (samples[:, DOC] >= 0) & (samples[:, ORD] == 0) & (samples[:, POSITION_IDS] < 4)
        )
    return samples


@dataclass(frozen=True)
class Case:
    """One way to run the training steps."""

    num_samples: ClassVar[int] = SAMPLES  # of a step
    steps: ClassVar[int] = STEPS
    least_norm: ClassVar[float] = CLIP  # of the gradients, that clipping is active

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero_stage: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    accumulation: int = 1
    precision: str = "fp32"
    offload: bool = False
    dropout: float = 0.0  # after embeddings, attention and FFN
    attention_dropout: float = 0.0
    variant: str = ""  # of VARIANTS
    optimizer: str = "adamw"
    loss_rows: int = 0
    experts: int = 1  # ranks, of the data-parallel ones

    @property
    def num_losses(self) -> int:
        return len(LOSSES) if self.variant.startswith("MTP") else OBJECTIVES

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def layout(self) -> str:
        return f"{self.tensor}x{self.pipeline}x{self.data}" + (f"e{self.experts}" if self.experts > 1 else "")

    @property
    def micro_batch_size(self) -> int:
        return self.num_samples // (self.data * self.accumulation)

    @property
    def tolerances(self) -> dict[str, float]:
        """The largest difference of each kind from one process."""
        if self.variant == "deepnorm" and self.precision == "fp32":
            # Gradients agree as elsewhere; of some biases they are so small that AdamW, which divides by their root,
            # enlarges the rounding.
            return TOLERANCES["fp32"] | {"weights": 5e-5}
        return TOLERANCES[self.precision]

    @property
    def alone(self) -> Case:
        """What one process computes for comparison; it only depends on the number of layers, dropout and options."""
        return type(self)(
            pipeline=self.num_layers if self.num_layers > 4 else 1,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            variant=self.variant,
            optimizer=self.optimizer,
        )

    def samples(self, step: int) -> np.ndarray:
        """All samples of a step, int32 [num_samples, fields, row length]."""
        return samples_of(step, has_memory=self.variant == MEMORY)

    def batch(self, fields: np.ndarray, samples: np.ndarray) -> Batch:
        """Some of them as the model takes them. Args: samples: int64 [B], their numbers."""
        return Batch(fields, samples)

    @property
    def num_layers(self) -> int:
        return max(4, self.pipeline)

    @property
    def parallel(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "sequence_parallel": self.sequence_parallel,
            "expert_parallel_size": self.experts,
            "zero_stage": self.zero_stage,
            "offload_optimizer": self.offload,
        }

    def __str__(self) -> str:
        words = [self.layout, f"zero{self.zero_stage}", self.recompute, f"accumulation{self.accumulation}"]
        words += ["sp"] * self.sequence_parallel + ["offload"] * self.offload
        words += [self.precision] * (self.precision != "fp32")
        words += ["dropout"] * bool(self.dropout or self.attention_dropout) + [self.variant] * bool(
            self.variant
        )
        words += [self.optimizer] * (self.optimizer != "adamw") + ["loss rows"] * bool(self.loss_rows)
        return "-".join(words)

    def config(self) -> Config:
        # Eight heads and a padded vocabulary of 128 rows per rank: at 8 tensor-parallel ranks half of them hold only
        # padding. Adam's epsilon is as large as a typical gradient here: below it, the update of an element whose
        # gradient is rounding noise (the key's bias) would be that noise at the size of the learning rate.
        decoder = self.num_layers // 2 if self.variant in ENCODER_DECODER else 0
        tree = {
            "model": {
                "num_layers": self.num_layers - decoder, "decoder_layers": decoder, "hidden_size": 32,
                "num_attention_heads": 8, "max_position": 64,
                "vocab_size": VOCAB_SIZE, "init_std": 0.1, "embedding_dropout": self.dropout,
                "output_dropout": self.dropout, "attention_dropout": self.attention_dropout,
                "activation_dropout": self.dropout if self.variant else 0.0,
                "final_dropout": self.dropout if self.variant else 0.0,
                **VARIANTS[self.variant],
            },
            "training": {"steps": STEPS, "precision": self.precision, "recompute": self.recompute}
            | ({"loss_rows": self.loss_rows} if self.loss_rows else {}),
            "batch": {"micro_batch_size": self.micro_batch_size, "global_batch_size": SAMPLES},
            "data": {"sequence_length": 32, "row_length": ROW_LENGTH},
            "optimizer": {"clip_grad_norm": CLIP, "weight_decay": 0.1, "kind": self.optimizer}
            | ({} if self.optimizer == "adafactor" else {"eps": 1e-3}),
            "parallel": self.parallel,
        }  # fmt: skip
        system = VARIANTS[self.variant].get("system")
        if system in ("llama", "qwen2", "deberta_v3"):  # their classes read no blanks
            tree["objectives"] = {"masked_lm" if system == "deberta_v3" else "causal": 1}
        if self.variant.startswith("MTP"):
            tree["objectives"] = {"causal": 1}
        if self.variant == MEMORY:
            tree |= {"objectives": {"xlnet": 1}, "xlnet": {"memory_length": 8}}
        if self.zero_stage == 3:  # else every parameter of this size stays whole on all ranks
            tree["deepspeed"] = {"zero_optimization": {"stage3_param_persistence_threshold": 500}}
        return build(Config, tree)


def matrix() -> list[Case]:
    """Tensor x pipeline x data <= 8 in powers of two, x ZeRO x sequence parallelism x recomputation x accumulation."""
    degrees = [1, 2, 4, 8]
    return [
        Case(tp, pp, dp, zero, sequence_parallel, recompute, accumulation)
        for tp, pp, dp in itertools.product(degrees, repeat=3)
        if tp * pp * dp <= MAX_RANKS
        for zero in ((1, 2, 3) if pp == 1 else (1,))
        for sequence_parallel in ((False, True) if tp > 1 else (False,))
        for recompute in ("none", "selective", "full")
        for accumulation in (1, 4)
    ]


# Half precision against one process in fp32; offloading; dropout, which is the same in every layout.
HALF = [
    *(Case(1, 1, 2, zero, accumulation=4, precision=p) for zero in (1, 2, 3) for p in ("bf16", "fp16")),
    *(Case(2, 1, 1, 1, True, precision=precision) for precision in ("bf16", "fp16")),
    *(Case(2, 1, 2, 3, recompute="full", precision=precision) for precision in ("bf16", "fp16")),
    Case(2, 2, 1, 1, True, accumulation=4, precision="bf16"),
    Case(1, 4, 1, 1, recompute="selective", precision="bf16"),
]
OFFLOAD = [
    *(Case(1, 1, 2, zero, accumulation=4, offload=True) for zero in (1, 2, 3)),
    Case(2, 1, 2, 2, True, offload=True),
    *(Case(1, 1, 2, zero, precision=p, offload=True) for zero in (1, 2, 3) for p in ("bf16", "fp16")),
]
DROPOUT = [
    Case(1, 1, 2, 2, recompute="selective", accumulation=4, dropout=0.1, attention_dropout=0.1),
    Case(1, 1, 4, 3, dropout=0.1, attention_dropout=0.1),
    Case(1, 2, 1, 1, recompute="full", accumulation=4, dropout=0.1, attention_dropout=0.1),
    Case(1, 4, 2, 1, dropout=0.1, attention_dropout=0.1),
    Case(2, 1, 1, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
    Case(4, 1, 2, 1, True, recompute="selective", dropout=0.1, attention_dropout=0.1),
    Case(2, 2, 1, 1, True, recompute="full", accumulation=4, dropout=0.1, attention_dropout=0.1),
]
OPTIONS = [
    case
    for variant in ("post-norm", "rms-norm", "glm4", "deepnorm")
    for case in (
        Case(2, 1, 1, 2, accumulation=4, dropout=0.1, variant=variant),
        Case(2, 1, 2, 1, True, "selective", variant=variant),
        Case(1, 2, 1, 1, recompute="full", accumulation=4, dropout=0.1, variant=variant),
        Case(2, 2, 1, 1, True, variant=variant),
        Case(1, 1, 2, 3, variant=variant),
    )
]
POSITIONS = [  # rotary ones on GLM's blocks, with each way of the positions in spans
    case
    for variant in ("rotary table", "rotary halves", "rotary")
    for case in (
        Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant=variant),
        Case(1, 1, 2, 3, recompute="full", dropout=0.1, variant=variant),
        Case(2, 1, 1, 2, recompute="selective", attention_dropout=0.1, variant=variant),
        Case(1, 4, 1, 1, accumulation=4, variant=variant),
    )
]
HEAD_NORMS = [  # whose scales all tensor-parallel ranks hold, with the scaled wavelengths of Llama 3.1
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant="norms of heads"),
    Case(4, 1, 2, 1, recompute="selective", variant="norms of heads"),
    Case(1, 1, 2, 3, recompute="full", dropout=0.1, variant="norms of heads"),
    Case(2, 1, 2, 3, accumulation=4, variant="norms of heads"),
    Case(1, 4, 1, 1, accumulation=4, variant="norms of heads"),
]
LOCAL = [  # on GLM's batches, whose positions begin again; a first block without its norm, norms without a bias
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant="local layers"),
    Case(1, 1, 2, 3, recompute="full", dropout=0.1, variant="local layers"),
    Case(2, 1, 2, 2, recompute="selective", attention_dropout=0.1, variant="local layers"),
    Case(1, 4, 1, 1, accumulation=4, variant="local layers"),
]

MODERN_GLM = [
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant="modern GLM"),
    Case(1, 1, 2, 3, recompute="full", variant="modern GLM"),
    Case(2, 1, 1, 2, recompute="selective", variant="modern GLM"),
    Case(1, 4, 1, 1, accumulation=4, variant="modern GLM"),
    Case(4, 1, 2, 1, True, accumulation=4, dropout=0.1, variant="modern GLM"),
    Case(2, 2, 1, 1, True, recompute="full", variant="modern GLM, local layers"),
    Case(1, 1, 2, 3, accumulation=4, variant="modern GLM, local layers"),
    Case(2, 1, 1, 2, recompute="selective", dropout=0.1, variant="modern GLM, local layers"),
]

MUP = [
    Case(2, 1, 2, 2, True, accumulation=4, dropout=0.1, variant="muP"),
    Case(1, 1, 2, 3, variant="muP"),
    Case(2, 2, 1, 1, variant="muP"),
    Case(1, 2, 2, 1, recompute="full", accumulation=4, variant="muP"),
]


def with_optimizer(kind: str, case: Case) -> Case:
    """AdaFactor takes a gradient at its sign: one that is only rounding, as of the key's bias, would differ."""
    return replace(case, optimizer=kind, variant="rms-norm" if kind == "adafactor" else case.variant)


OPTIMIZERS = [  # other than AdamW: they read sums over whole tensors, and Muon sends matrices to one rank
    with_optimizer(kind, case)
    for kind in OTHERS
    for case in (
        Case(1, 1, 2, 2, accumulation=4, dropout=0.1),
        Case(2, 1, 2, 1, True, "selective"),
        Case(1, 2, 1, 1, recompute="full", accumulation=4, dropout=0.1),
        Case(2, 2, 1, 1, True),
        Case(2, 1, 1, 2, variant="rotary halves"),
    )
]

# Without dropout cross-attention of pre-norm models is nearly uniform: gradients of its queries are small differences,
# which rounding changes by 1e-5 in three steps.
PARTS = [
    Case(1, 1, 2, 2, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="encoder-decoder"),
    Case(1, 1, 2, 3, recompute="full", dropout=0.1, attention_dropout=0.1, variant="bart"),
    Case(2, 1, 1, 1, recompute="selective", dropout=0.1, attention_dropout=0.1, variant="bart"),
    Case(2, 1, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="t5"),
    Case(1, 2, 1, 1, recompute="full", accumulation=4, dropout=0.1, attention_dropout=0.1, variant="bart"),
    Case(1, 2, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="encoder-decoder"),
    Case(2, 2, 1, 1, accumulation=4, variant="bart"),
    Case(1, 4, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="t5"),
    Case(2, 1, 1, 2, recompute="selective", dropout=0.1, attention_dropout=0.1, variant="t5 with buckets"),
    # Micro-batches of one step have unequal numbers of document groups, and a bias for each.
    Case(
        1,
        1,
        2,
        3,
        recompute="full",
        accumulation=4,
        dropout=0.1,
        attention_dropout=0.1,
        variant="t5 with buckets",
    ),
    Case(2, 1, 1, 1, True, recompute="full", accumulation=4, attention_dropout=0.1, variant="buckets"),
    Case(2, 1, 1, 1, True, recompute="selective", dropout=0.1, attention_dropout=0.1, variant="xlnet"),
    Case(1, 1, 2, 3, recompute="full", dropout=0.1, variant="xlnet"),
    Case(1, 2, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="xlnet"),
    Case(2, 1, 1, 1, True, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="bart"),
    Case(2, 1, 1, 3, True, recompute="full", dropout=0.1, attention_dropout=0.1, variant="t5 with buckets"),
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="bart"),
    Case(
        4, 1, 1, 2, True, recompute="selective", dropout=0.1, attention_dropout=0.1, variant="encoder-decoder"
    ),
]
SHARED_BY_STAGES = [  # what all pipeline stages hold, or take from the batch
    Case(1, 2, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="buckets"),
    Case(2, 2, 1, 1, True, recompute="full", attention_dropout=0.1, variant="t5 with buckets"),
    Case(1, 4, 2, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="t5 with buckets"),
    Case(1, 2, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant=MEMORY),
    Case(2, 2, 1, 1, True, recompute="selective", dropout=0.1, variant=MEMORY),
]
WITH_MEMORY = [
    Case(1, 1, 2, 2, accumulation=4, dropout=0.1, attention_dropout=0.1, variant=MEMORY),
    Case(1, 1, 2, 3, recompute="full", dropout=0.1, variant=MEMORY),
    Case(2, 1, 1, 1, accumulation=4, dropout=0.1, attention_dropout=0.1, variant=MEMORY),
    Case(2, 1, 1, 1, True, recompute="selective", dropout=0.1, attention_dropout=0.1, variant=MEMORY),
]

DISENTANGLED = [  # queries and keys of buckets by the tokens' products, used twice, and by own ones
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, attention_dropout=0.1, variant="disentangled"),
    Case(1, 1, 2, 3, recompute="full", dropout=0.1, variant="disentangled"),
    Case(2, 1, 2, 2, recompute="selective", accumulation=4, dropout=0.1, variant="disentangled"),
    Case(2, 1, 1, 3, True, variant="disentangled"),
    Case(1, 4, 1, 1, accumulation=4, variant="disentangled"),
    Case(2, 1, 1, 1, True, recompute="full", dropout=0.1, variant="disentangled, own"),
    Case(1, 1, 2, 3, accumulation=4, variant="disentangled, own"),
]


LORA = [
    Case(2, 1, 1, 1, True, accumulation=4, variant="lora"),
    Case(1, 2, 1, 1, recompute="full", accumulation=4, dropout=0.1, variant="lora, parts"),
    Case(1, 1, 2, 3, variant="lora"),
    Case(2, 1, 1, 2, accumulation=4, variant="lora, some parts"),
    Case(2, 1, 2, 3, True, recompute="selective", variant="lora, parts"),
    Case(2, 1, 1, 3, accumulation=4, variant="lora, some parts"),
    Case(1, 1, 2, 2, accumulation=4, dropout=0.1, variant="lora, parts"),
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant="lora, encoder-decoder"),
    Case(2, 1, 1, 1, accumulation=4, variant="lora, encoder-decoder"),
    Case(2, 1, 1, 2, accumulation=4, variant="lora, disentangled"),
    Case(2, 1, 1, 3, True, variant="lora, disentangled"),
    Case(1, 1, 2, 1, accumulation=4, variant="lora", offload=True),
    *(Case(1, 1, 2, zero, accumulation=4, variant="lora", precision="bf16") for zero in (1, 3)),
]


EXPERTS = [  # with each kind of router, and losses and biases of it
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant="experts"),
    Case(1, 1, 2, 2, recompute="full", accumulation=4, variant="experts"),
    Case(2, 1, 2, 1, recompute="selective", accumulation=4, variant="experts"),
    Case(1, 4, 2, 1, accumulation=4, variant="experts"),
    Case(2, 1, 1, 2, True, "full", accumulation=4, variant="experts, softmax"),
    Case(1, 2, 2, 1, accumulation=4, variant="experts, softmax"),
    Case(1, 2, 1, 1, recompute="full", accumulation=4, variant="experts, encoder-decoder"),
    Case(2, 1, 2, 2, True, accumulation=4, variant="experts, encoder-decoder"),
    # Experts on several ranks: on all data-parallel ones, or twice, and with tensor parallelism and stages.
    Case(1, 1, 2, 2, accumulation=4, variant="experts", experts=2),
    Case(1, 1, 4, 1, recompute="full", accumulation=4, variant="experts", experts=2),
    Case(2, 1, 2, 2, True, accumulation=4, dropout=0.1, variant="experts", experts=2),
    Case(2, 2, 2, 1, accumulation=4, variant="experts", experts=2),
    Case(1, 1, 4, 2, accumulation=4, variant="experts, encoder-decoder", experts=4),
    Case(1, 1, 2, 2, accumulation=4, variant="experts, softmax", experts=2, offload=True),
    *(
        replace(Case(1, 1, 2, 2, accumulation=4, variant="experts", experts=2), optimizer=kind)
        for kind in OTHERS
    ),
    replace(Case(2, 2, 2, 1, accumulation=4, variant="experts", experts=2), optimizer="muon"),
    replace(Case(1, 1, 4, 1, variant="experts", experts=2), optimizer="muon"),
    Case(1, 1, 2, 1, accumulation=4, variant="experts", offload=True),
    Case(1, 1, 2, 2, accumulation=4, variant="experts, all", precision="fp16"),
]


# A further block that reads embeddings again, on the last stage; what it predicts of GLM's batches says nothing.
FURTHER_TOKENS = [
    Case(2, 2, 1, 1, True, accumulation=4, dropout=0.1, variant="MTP"),
    Case(1, 1, 2, 2, accumulation=4, variant="MTP", experts=2),
    Case(2, 1, 1, 2, True, "full", accumulation=4, variant="MTP"),
    Case(2, 1, 2, 1, recompute="selective", variant="MTP"),
    Case(1, 4, 1, 1, recompute="full", accumulation=4, dropout=0.1, variant="MTP"),
    Case(2, 2, 2, 1, True, accumulation=4, variant="MTP", experts=2),
    Case(1, 2, 2, 1, accumulation=4, variant="MTP, dense"),
    Case(2, 1, 1, 1, True, accumulation=4, variant="MTP, dense", loss_rows=7),
    Case(1, 1, 2, 2, accumulation=4, variant="MTP, dense", optimizer="muon"),
    Case(1, 1, 2, 1, accumulation=4, variant="MTP, dense", precision="fp16"),
]


def _pairs(case: Case) -> set[tuple]:
    values = (
        case.tensor > 1, case.pipeline > 1, case.data > 1, case.zero_stage, case.sequence_parallel, case.recompute,
        case.accumulation,
    )  # fmt: skip
    return set(itertools.combinations(enumerate(values), 2))


def reduced() -> list[Case]:
    """Few cases on few ranks in which every two settings that can meet do meet; parallel axes count as on or off."""
    everything = matrix()
    missing = set().union(*map(_pairs, everything))
    chosen = [Case(2, 2, 2, 1, True, "full", 4)]
    missing -= _pairs(chosen[0])
    while missing:
        best = max(everything, key=lambda case: (len(_pairs(case) & missing), -case.ranks))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


LOSS_ROWS = [  # logits in parts; with dropout and biases, tied and untied words
    Case(2, 1, 1, 2, accumulation=4, dropout=0.1, variant="post-norm", loss_rows=7),
    Case(1, 2, 1, 1, accumulation=4, variant="post-norm", loss_rows=16),
    Case(2, 2, 1, 1, True, accumulation=4, variant="glm4", loss_rows=5),
    Case(1, 1, 2, 3, recompute="full", loss_rows=16),
    Case(1, 1, 2, 3, precision="bf16", loss_rows=32),
    Case(2, 1, 2, 1, precision="fp16", accumulation=4, loss_rows=16),
]

FEW = [  # of each list above, in the default run
    DROPOUT[2],
    LOSS_ROWS[2],
    HALF[1],
    OFFLOAD[3],
    OPTIONS[0],
    POSITIONS[0],
    HEAD_NORMS[0],
    LOCAL[0],
    DISENTANGLED[0],
    MODERN_GLM[1],  # with rotary positions in halves
    MUP[0],
    PARTS[3],
    SHARED_BY_STAGES[3],
    *LORA[:2],
    EXPERTS[0],
    EXPERTS[6],
    *EXPERTS[8:10],
    EXPERTS[-1],
    *FURTHER_TOKENS[:2],
]
