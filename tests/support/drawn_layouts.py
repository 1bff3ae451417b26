#!/usr/bin/env python3
"""Random layouts x options x objectives against one process: each draw is a pure function of its number.

    python tests/support/drawn_layouts.py --first 0 --count 200
    python tests/support/drawn_layouts.py --first 17 --count 1    # the draw of a failure

A draw has a layout of up to four ranks, options of the model, one to three objectives with their text, and how it is
trained. The rules of the configuration say what goes together: a refused draw is drawn again. It is compared as a case
of parity.py, with the same tolerances; there the cases are chosen, here they are random.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from data_utils.common.errors import ConfigError, run_command
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, make_objective
from data_utils.objectives.interface import Objective
from megatron_lite.config.model import ACTIVATIONS, BIASES, BLOCK_POSITIONS, INITS, NORMS, POSITIONS, RELATIVE
from megatron_lite.config.systems import ENCODER_DECODERS, SYSTEMS
from megatron_lite.config.task_rows import with_task_rows
from megatron_lite.config.tree import Config
from support.data.recipes import FIRST_TEXT_TOKEN, collate, vocabulary, windows
from support.parity import Outcome, outcomes_of
from support.training.parity_cases import CLIP, OTHERS, TOLERANCES, VOCAB_SIZE, Case

DEGREES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]  # tensor, pipeline, data
SEQUENCE_LENGTH = 32
FIRST_WORD = 200  # lower ids are special tokens

# What an option may be instead of its default.
OPTIONS: dict[str, Sequence[Any]] = {
    "num_attention_heads": (4,),
    "head_dim": (4, 12),
    "num_key_value_heads": (2, 4),
    "ffn": ("gated",),
    "ffn_size": (48,),
    "positions": POSITIONS,
    "rotary_share": (0.5,),
    "relative": RELATIVE,
    "unscaled_scores": (True,),
    "norm": NORMS,
    "sandwich_norm": (True,),
    "embedding_norm": (True,),
    "rms_norm": (True,),
    "activation": ACTIVATIONS,
    "biases": BIASES,
    "init": INITS,
    "embedding_gradient_shrink": (0.1,),
    "scale_embedding": (True,),
    "segments": (1, 6),
    "task_types": (32,),
    "tie_word_embeddings": (False,),
    "scale_head": (True,),
    "head_transform": (True,),
    "head_bias": (True,),
    "sentence_classes": (2, 3),
    "span_boundary_places": (3, 20),
    "embedding_size": (16,),
    "share_layers": ("attention", "ffn", "all"),
}
DROPOUTS = ("embedding", "attention", "activation", "output", "final", "sentence")
SECTIONS: dict[str, Mapping[str, Sequence[Any]]] = {
    "blank_infilling": {
        "token_prob": (0.4, 1.0), "sentence_prob": (0.0,), "masked_lm": (True,), "cross_document_attention": (True,),
    },
    "masked_lm": {"next_sentence": (True,), "whole_words": (True,)},
    "ernie": {"next_sentence": (True,)},
    "albert": {"sentence_order": (False,)},
    "unilm": {"next_sentence": (False,)},
    "bart": {"predict_cls": (True,), "permute_sentences": (False,)},
    "xlnet": {"memory_length": (8,), "two_texts": (False,), "orders": (1,)},
}  # fmt: skip
# Others have models of their own, or need heads of their own (tests/train/test_class_heads.py).
NAMES = tuple(
    name
    for name, made in OBJECTIVES.items()
    if name not in ("optimus", "electra", "entities", "contrastive", "tsdae")
    and not made.config_class().class_heads
)
# Systems with experts say nothing about their number.
STACKS = tuple(
    name for name, options in SYSTEMS.items() if name not in ENCODER_DECODERS and "experts" not in options
)
WITH_DECODER = tuple(name for name in NAMES if OBJECTIVES[name].config_class().has_target)
NOT_WITH_DECODER = ("sandwich_norm", "num_key_value_heads", "share_layers")


@dataclass(frozen=True)
class Drawn(Case):
    """A case whose options and objectives are those of a drawn configuration."""

    number: int = 0
    tree: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)  # all but the layout
    num_samples: ClassVar[int] = 16
    steps: ClassVar[int] = 2
    num_losses: ClassVar[int] = len(LOSS_NAMES)
    least_norm: ClassVar[float] = 0.0

    @property
    def alone(self) -> Drawn:
        return replace(
            self, tensor=1, pipeline=1, data=1, zero_stage=1, sequence_parallel=False, recompute="none",
            accumulation=1, offload=False,
        )  # fmt: skip

    def config(self) -> Config:
        tree = {
            **self.tree,
            "training": {**self.tree["training"], "recompute": self.recompute},
            "batch": {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.num_samples},
            "parallel": self.parallel,
        }
        zero: dict[str, Any] = {"reduce_bucket_size": 3000} if self.number % 2 else {}  # several buckets
        if self.zero_stage == 3:  # else every parameter of this size stays whole on all ranks
            zero["stage3_param_persistence_threshold"] = 500
        return with_task_rows(build(Config, {**tree, "deepspeed": {"zero_optimization": zero}}))

    def samples(self, step: int) -> np.ndarray:
        made = objective_of(self)
        texts = windows(self.num_samples, SEQUENCE_LENGTH, 2 * self.number + step)
        for chunk in (chunk for chunks in texts for chunk in chunks):
            is_word = chunk >= FIRST_TEXT_TOKEN
            chunk[is_word] = FIRST_WORD + chunk[is_word] % (VOCAB_SIZE - FIRST_WORD)
        return collate(made, texts, step * self.num_samples)

    def __str__(self) -> str:
        model = " ".join(f"{key}={value}" for key, value in self.tree["model"].items() if key not in _SIZES)
        others = {key: self.tree[key] for key in self.tree if key in OBJECTIVES}
        smoothing = self.tree["training"]["label_smoothing"]
        clip = self.tree["optimizer"]["clip_grad_norm"]
        return (
            f"draw {self.number}: {super().__str__()} | {' + '.join(self.tree['objectives'])} {others or ''} | {model} "
            f"| smoothing {smoothing}, clip {clip}"
        )


_SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "vocab_size": VOCAB_SIZE}


def objective_of(case: Drawn) -> Objective:
    """What makes the samples. Raises ConfigError where its settings do not go together."""
    config = case.config()
    data = config.data
    words = vocabulary()
    words = replace(
        words,
        size=VOCAB_SIZE,
        sentence_end=words.sentence_end[-VOCAB_SIZE:],
        word_start=words.word_start[-VOCAB_SIZE:],
        sentinels=tuple(range(VOCAB_SIZE - 1, VOCAB_SIZE - 41, -1)),
    )
    return make_objective(
        config.objective_choices, words, config.training.seed, data.sequence_length, data.row_length
    )


def proposed(
    rng: random.Random, number: int, *, has_decoder: bool, has_system: bool, way: str, optimizer: str
) -> Drawn:
    """Of settings that need not go together."""
    model: dict[str, Any] = {**_SIZES, "num_layers": rng.choice((1, 2, 2, 3)), "init_std": 0.1}
    if has_decoder:
        model["decoder_layers"] = rng.choice((1, 2))
    if has_system:
        model["system"] = rng.choice(ENCODER_DECODERS if has_decoder else STACKS)
    options = [name for name in OPTIONS if not (has_decoder and name in NOT_WITH_DECODER)]
    model |= {name: rng.choice(OPTIONS[name]) for name in options if rng.random() < 0.15}
    if way:
        model |= {"positions": "rotary", "block_positions": way}
    if optimizer == "adafactor":  # at the sign of a gradient it steps, be that rounding
        model |= {"biases": "none"}  # the key's
        if model.get("relative") == "xlnet":  # vectors of segments, where all tokens are of one
            del model["relative"]
    has_dropout = rng.random() < 0.5
    model |= {f"{place}_dropout": rng.choice((0.0, 0.1)) if has_dropout else 0.0 for place in DROPOUTS}
    objectives = rng.sample(WITH_DECODER if has_decoder else NAMES, rng.choice((1, 1, 2, 3)))
    tree: dict[str, Any] = {
        "model": model,
        "training": {
            "steps": Drawn.steps, "precision": "fp32", "seed": number,
            "label_smoothing": rng.choice((0.0, 0.0, 0.1)),
        },
        "optimizer": {
            "clip_grad_norm": rng.choice((0.0, CLIP)), "weight_decay": 0.1, "kind": optimizer,
            **({} if optimizer == "adafactor" else {"eps": 1e-3}),
        },
        "data": {"sequence_length": SEQUENCE_LENGTH},
        "objectives": {name: rng.choice((1.0, 2.0)) for name in objectives},
    }  # fmt: skip
    for name in objectives:
        changed = {
            key: rng.choice(values) for key, values in SECTIONS.get(name, {}).items() if rng.random() < 0.3
        }
        if changed:
            tree[name] = changed
    tensor, pipeline, data = DEGREES[number % len(DEGREES)]
    # Stages serve neither ZeRO 2 and 3 nor offloading, other optimizers than AdamW neither ZeRO 3 nor offloading.
    stages = (1,) if pipeline > 1 else (1, 2, 3) if optimizer == "adamw" else (1, 2)
    return Drawn(
        tensor,
        pipeline,
        data,
        zero_stage=rng.choice(stages),
        sequence_parallel=tensor > 1 and rng.random() < 0.5,
        recompute=rng.choice(("none", "selective", "full")),
        accumulation=rng.choice((1, 2, 4)),
        offload=pipeline == 1 and optimizer == "adamw" and rng.random() < 0.15,
        number=number,
        tree=tree,
        optimizer=optimizer,
    )


def draw(number: int) -> tuple[Drawn, int]:
    """The draw of a number, and how many proposals were refused before it.

    The degrees, a decoder, a published system, the way of rotary positions in spans and the optimizer stay from
    proposal to proposal, so that no rule makes them rare. Neither a system nor a decoder has such ways.
    """
    rng = random.Random(f"layouts, options and objectives {number}")
    has_decoder, has_system = rng.random() < 0.2, rng.random() < 0.3
    own = random.Random(f"positions in spans and optimizers {number}")
    way = "" if has_system or has_decoder else own.choice(("", "", *BLOCK_POSITIONS))
    others = tuple(kind for kind in OTHERS if not has_system or kind != "adafactor")
    optimizer = own.choice(("adamw",) * len(others) + others)
    refused = 0
    while True:
        case = proposed(
            rng, number, has_decoder=has_decoder, has_system=has_system, way=way, optimizer=optimizer
        )
        try:
            case.config(), objective_of(case)
        except ConfigError:
            refused += 1
        else:
            return case, refused


def failures_of(case: Drawn, outcome: Outcome) -> list[str]:
    """What exceeds the tolerance of parity.py, and ten times the rounding of the draw itself, in one process.

    Some draws have tensors whose gradient is a small difference of large sums (queries of a nearly uniform
    cross-attention), or elements whose gradient is so small that Adam's division enlarges its rounding: there rounding
    alone is near the tolerance. It is measured by the same steps in two and in four micro-batches. An error of method
    gives 1e-3 and more, so 1e-4 is too much anyway.
    """
    if not outcome.failures():
        return []
    rounding, four = outcomes_of([replace(case.alone, accumulation=count) for count in (2, 4)])
    rounding.join(four)
    return [
        f"{case}: {kind} differ by {value:.1e}, more than {most:.1e}, at {outcome.where[kind]}"
        for kind, value in outcome.largest.items()
        if value > (most := min(1e-4, max(TOLERANCES["fp32"][kind], 10 * rounding.largest[kind])))
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (default: 0)")
    parser.add_argument("--count", type=int, default=200, help="draws (default: 200)")
    options = parser.parse_args(arguments)
    started, failed, refused, largest = time.perf_counter(), [], 0, 0.0
    for number in range(options.first, options.first + options.count):
        case, others = draw(number)
        refused += others
        try:
            (outcome,) = outcomes_of([case])
            lines = failures_of(case, outcome)
            largest = max(largest, *outcome.largest.values())
            shown = " ".join(f"{kind} {value:.1e}" for kind, value in outcome.largest.items())
        except AssertionError as error:
            lines, shown = [f"{case}: {error}"], "failed"
        print(f"{case} | {shown}", flush=True)
        for line in lines:
            print(f"    {line}", file=sys.stderr, flush=True)
        failed += [number] * bool(lines)
    proposals = refused + options.count
    print(
        f"{options.count} draws, {len(failed)} beyond tolerance {failed or ''}, largest difference {largest:.1e}; "
        f"{refused} of {proposals} proposals ({refused / proposals:.0%}) refused by the rules; "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
