#!/usr/bin/env python3
"""Every layout against one process: one list of cases, for pytest (test_parity.py) and for docs/records/parity.md.

    python tests/support/parity.py --output docs/records/parity.md      # every case
    python tests/support/parity.py --layouts 2x1x2 1x2x1        # tensor x pipeline x data parallel ranks
    python tests/support/parity.py --output docs/records/parity.md --tables "Other optimizers"    # only these

The one process is plain torch, without DeepSpeed: a loop of forward, backward, clip_grad_norm_ and AdamW over all
samples of a step at once. A case runs the same samples through an engine. Ranks are forked once per layout, run all its
cases, and compare what they own, piece by piece, with the whole tensors of the one process.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from data_utils.common.batch_fields import WEIGHTS
from data_utils.common.errors import ConfigError, run_command
from megatron_lite.checkpoint.fragments import Fragment
from megatron_lite.checkpoint.shard_slices import matrix_shape
from megatron_lite.config.experts import ExpertsConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.engine.engine import TYPES, Engine
from megatron_lite.engine.parameter_groups import parameter_groups
from megatron_lite.engine.plain import make_engine
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.router import Router
from megatron_lite.transformer.tensor_parallel import whole_shape
from support.distributed import run_ranks
from support.records import commit_of_record
from support.systems.electra import CASES as GENERATOR_AND_DISCRIMINATOR
from support.systems.entity_models import CASES as ENTITIES
from support.training.parity_cases import (
    CLIP,
    DISENTANGLED,
    DROPOUT,
    EXPERTS,
    FURTHER_TOKENS,
    HALF,
    HEAD_NORMS,
    KINDS,
    LOCAL,
    LORA,
    LR,
    MODERN_GLM,
    MUP,
    OBJECTIVES,
    OFFLOAD,
    OPTIMIZERS,
    OPTIONS,
    PARTS,
    POSITIONS,
    SAMPLES,
    SHARED_BY_STAGES,
    STEPS,
    TOLERANCES,
    VOCAB_SIZE,
    WITH_MEMORY,
    Case,
    matrix,
)
from support.transformer.optimizers import Plain

# The one process

ROUTER_BIAS = ".router.bias"  # no gradient moves it
# Of the model's largest gradient. The loss does not depend on a tensor whose gradient is below, such as XLNet's vectors
# of segments where all tokens are of one (measured: 5e-9 in fp32; the smallest of other tensors: 8e-6).
ROUNDING = 1e-7


@dataclass
class Record:
    """What one process computed: parameters as matrices, by name."""

    initial: dict[str, torch.Tensor]
    objective_sums: list[torch.Tensor] = field(default_factory=list)  # per step fp64 [objectives, 2]
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # before clipping
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def micro_batch(case: Case, step: int, first: int, size: int) -> tuple[Batch, float]:
    """Samples of a step, and the factor that makes their loss a part of its mean."""
    samples = case.samples(step)
    batch = case.batch(samples[first : first + size], np.arange(first, first + size))
    return batch, 1.0 / np.count_nonzero(samples[:, WEIGHTS])


def move_bias(router: Router, settings: ExpertsConfig) -> None:
    """By the definition: up where an expert has fewer tokens than the mean, down where it has more."""
    counts, router.step_sums = router.step_sums[: settings.count].tolist(), None
    for expert, count in enumerate(counts if router.bias is not None else ()):
        mean = sum(counts) / len(counts)
        router.bias.data[expert] += settings.bias_rate * ((count < mean) - (count > mean))


def as_matrices(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, without padding rows of the vocabulary."""
    return {
        name: tensor.detach().clone()[: _rows(name)].view(matrix_shape(tuple(tensor[: _rows(name)].shape)))
        for name, tensor in named.items()
    }


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros for a head that has no part in the loss."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _rows(name: str) -> int | None:
    of_words = (
        "embedding.word_embeddings.weight", "heads.vocabulary.weight", "heads.bias", "heads.boundary_bias"
    )  # fmt: skip
    return VOCAB_SIZE if name.endswith(of_words) else None


def reference_of(case: Case) -> Record:
    """The record a case is compared with."""
    return _one_process(case.alone)


@functools.cache
def _one_process(case: Case) -> Record:
    """Plain torch on all samples of a step at once."""
    config = case.config()
    model = build_model(config, case.num_losses)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(
            (config.model.lora is None or ".lora." in name) and not name.endswith(ROUTER_BIAS)
        )
    settings = config.optimizer
    groups, betas = parameter_groups(named, config), (settings.beta1, settings.beta2)
    trained = {name: p for name, p in named.items() if not model_spec(config).is_unused(name, config)}
    plain = Plain(trained, settings, config.model.width_ratio)
    if case.optimizer == "adamw":
        decays = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
        own = [plain.of_width(name) for name in named]
        each = [
            {"params": [p], "lr": LR * lr, "eps": c.eps, "weight_decay": decays[p] and c.weight_decay}
            for p, (c, lr) in zip(named.values(), own, strict=True)
        ]
        update = torch.optim.AdamW(each, betas=betas).step
    else:
        update = functools.partial(plain.step, LR)
    record = Record(as_matrices(named))
    for step in range(case.steps):
        model.zero_grad()
        batch, factor = micro_batch(case, step, 0, case.num_samples)
        data = MicroBatch.from_batch(batch, torch.device("cpu"), config.model, dropout_seed=step)
        loss_sum, sums = model(data)
        (loss_sum * factor).backward()
        record.objective_sums.append(sums.double())
        record.gradients.append(as_matrices({name: _gradient(p) for name, p in named.items()}))
        record.norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm or math.inf).item()
        )
        update()
        for router in (module for module in model.modules() if isinstance(module, Router)):
            move_bias(router, config.model.experts)
    record.weights = as_matrices(named)
    return record


# A case


@dataclass
class Outcome:
    """Largest relative differences from one process, by kind, and in which tensor and step."""

    case: Case
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    where: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(
        self,
        kind: str,
        where: str,
        got: torch.Tensor,
        expected: torch.Tensor,
        scale: torch.Tensor,
        rounding: float = 0.0,
    ) -> None:
        """The largest difference of a tensor's elements over the largest element of the whole tensor.

        Args: rounding: a tensor up to here is 0 but for rounding; two such tensors do not differ.
        """
        if not got.numel():
            return
        largest = scale.double().abs().max().clamp(min=1e-30)  # biases start as zeros
        if largest <= rounding and got.abs().max() <= rounding:
            return
        difference = ((got.cpu().double() - expected.double()).abs().max() / largest).item()
        if not difference <= self.largest[kind]:  # also if it is no number
            self.largest[kind] = difference if math.isfinite(difference) else math.inf
            self.where[kind] = where

    def failures(self) -> list[str]:
        """What exceeds the tolerance, as one line each."""
        tolerances = self.case.tolerances
        return [
            f"{self.case}: {kind} differ by {value:.1e}, more than {tolerances[kind]:.0e}, at {self.where[kind]}"
            for kind, value in self.largest.items()
            if value > tolerances[kind]
        ]

    def join(self, other: Outcome) -> None:
        """Another rank's outcome of the same case."""
        for kind, value in other.largest.items():
            if value > self.largest[kind]:
                self.largest[kind], self.where[kind] = value, other.where[kind]
        self.seconds = max(self.seconds, other.seconds)


def check_cover(
    fragments: Iterable[Fragment], whole: dict[str, torch.Tensor], context: ParallelContext
) -> None:
    """Raise AssertionError unless the ranks together own every element exactly once, copies left out."""
    counts = {name: torch.zeros_like(matrix) for name, matrix in whole.items()}
    for fragment in fragments:
        for owned in fragment.ranges():
            box = owned.slice
            counts[fragment.name][
                box.row : box.row_stop, box.column : box.column_stop
            ] += not fragment.is_copy
    total = context.sum(torch.cat([part.flatten() for part in counts.values()]).to(context.device)).cpu()
    parts = total.split([part.numel() for part in counts.values()])
    wrong = [name for name, part in zip(counts, parts, strict=True) if (part != 1).any()]
    assert not wrong, f"not every element is owned by exactly one rank: {wrong}"


def compare_fragment(
    outcome: Outcome,
    kind: str,
    step: int,
    fragment: Fragment,
    values: torch.Tensor,
    whole: dict[str, torch.Tensor],
    rounding: float = 0.0,
) -> None:
    expected = whole[fragment.name]
    assert matrix_shape(whole_shape(fragment.shape, fragment.partition, fragment.tp.size)) == expected.shape
    for owned in fragment.ranges():
        box = owned.slice
        got = values[owned.start - fragment.start : owned.stop - fragment.start].view(box.shape)
        part = expected[box.row : box.row_stop, box.column : box.column_stop]
        outcome.add(kind, f"{fragment.name}, step {step + 1}", got, part, expected, rounding)


def compare_weights(outcome: Outcome, step: int, engine: Engine, whole: dict[str, torch.Tensor]) -> None:
    """Fragments without weights hold an optimizer's state alone."""
    for fragment in engine.fragments():
        if "weight" in fragment.tensors:
            compare_fragment(outcome, "weights", step, fragment, fragment.tensors["weight"], whole)


def micro_batches_of(case: Case, engine: Engine, context: ParallelContext, step: int) -> list[MicroBatch]:
    """This rank's share of a step."""
    size, dp = case.micro_batch_size, context.dp
    indices = [micro * dp.size + dp.rank for micro in range(case.accumulation)]
    made = [micro_batch(case, step, index * size, size) for index in indices]
    share = 1.0 / (case.accumulation * dp.size)
    return [engine.prepared(batch, step, factor, share) for batch, factor in made]


def run_step(
    context: ParallelContext, engine: Engine, case: Case, step: int, record: Record, outcome: Outcome
) -> None:
    seen: list[tuple[Fragment, torch.Tensor]] = []
    with engine.observed_gradients(lambda fragment, gradient: seen.append((fragment, gradient.clone()))):
        result = engine.train_step(micro_batches_of(case, engine, context, step), LR)
    assert not result.skipped and result.grad_norm > case.least_norm, "clipping should be active"
    assert result.loss_scale == (65536.0 if case.precision == "fp16" else 1.0)
    sums = context.sum_losses(result.objective_sums).cpu()
    # Every loss token counts once. Weights of masked diffusion are no whole numbers, so their sums are rounded.
    torch.testing.assert_close(sums[:, 1], record.objective_sums[step][:, 1], rtol=1e-6, atol=0)
    for got, expected in zip(sums[:, 0], record.objective_sums[step][:, 0], strict=True):
        outcome.add("loss", f"step {step + 1}", got, expected, expected)
    norm = torch.tensor(record.norms[step])
    outcome.add("norm", f"step {step + 1}", torch.tensor(result.grad_norm), norm, norm)
    rounding = ROUNDING * max(whole.abs().max().item() for whole in record.gradients[step].values())
    for fragment, gradient in seen:
        gradient *= engine.clip_divisor(result.grad_norm)
        compare_fragment(outcome, "gradients", step, fragment, gradient, record.gradients[step], rounding)
    if step == 0:
        is_lora = case.config().model.lora is not None
        trained = {
            name: w
            for name, w in record.initial.items()
            if (".lora." in name or not is_lora) and not name.endswith(ROUTER_BIAS)
        }
        check_cover([fragment for fragment, _ in seen], trained, context)
        if is_lora:  # what is frozen costs no state
            assert all(f.tensors.keys() == {"weight"} for f in engine.fragments() if f.name not in trained)


def run_case(context: ParallelContext, case: Case, record: Record) -> Outcome:
    """Train the case's steps on this rank and compare what it owns with one process."""
    warnings.filterwarnings("error", message="c10d::")  # autograd meets a collective that it does not know
    started = time.perf_counter()
    outcome = Outcome(case)
    engine = make_engine(case.config(), context, case.num_losses)
    start = Outcome(case)
    # DeepSpeed takes its fp32 weights from the model after the cast to half precision.
    initial = {name: weight.to(TYPES[case.precision]).float() for name, weight in record.initial.items()}
    compare_weights(start, -1, engine, initial)
    assert start.largest["weights"] == 0.0, f"initial weights depend on the layout: {start.where}"
    for step in range(case.steps):
        run_step(context, engine, case, step, record, outcome)
    compare_weights(outcome, case.steps - 1, engine, record.weights)
    outcome.seconds = time.perf_counter() - started
    return outcome


def run_cases(context: ParallelContext, cases: Sequence[Case], records: Sequence[Record]) -> list[Outcome]:
    outcomes = []
    for case, record in zip(cases, records, strict=True):
        outcomes.append(run_case(context, case, record))
        gc.collect()  # an engine is full of cycles
    return outcomes


def outcomes_of(cases: Sequence[Case]) -> list[Outcome]:
    """Run cases of one layout on freshly forked ranks; the largest difference on any rank counts."""
    first = cases[0]
    assert all(case.layout == first.layout for case in cases)
    records = [reference_of(case) for case in cases]
    parallel = ParallelConfig(
        tensor_parallel_size=first.tensor,
        pipeline_parallel_size=first.pipeline,
        expert_parallel_size=first.experts,
    )
    per_rank = run_ranks(run_cases, first.ranks, cases, records, parallel=parallel)
    joined = per_rank[0]
    for others in per_rank[1:]:
        for mine, other in zip(joined, others, strict=True):
            mine.join(other)
    return joined


# The table


def by_layout(cases: Iterable[Case]) -> dict[str, list[Case]]:
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        grouped.setdefault(case.layout, []).append(case)
    return grouped


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def section(title: str, rows: list[list[Outcome]], commit: str) -> str:
    """Markdown: where its cases ran, and one row per list of outcomes (all of one layout)."""
    import deepspeed

    outcomes = [outcome for row in rows for outcome in row]
    failed = sum(bool(outcome.failures()) for outcome in outcomes)
    lines = [
        f"## {title}",
        "",
        f"{len(outcomes)} cases, {failed} beyond their tolerance. Commit {commit}; {hardware()};",
        f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, gloo.",
        "",
        "| tensor x pipeline x data | cases | loss | gradient norm | gradients | weights | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for of_layout in rows:
        largest = [max(outcome.largest[kind] for outcome in of_layout) for kind in KINDS]
        cells = [
            of_layout[0].case.layout.replace("x", " x "), str(len(of_layout)), *(f"{x:.1e}" for x in largest)
        ]  # fmt: skip
        lines.append("| " + " | ".join([*cells, f"{sum(o.seconds for o in of_layout):.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def sections_of(page: str) -> dict[str, str]:
    """The sections of docs/records/parity.md, by their titles."""
    return {part.partition("\n")[0]: f"## {part.strip()}\n" for part in page.split("\n## ")[1:]}


INTRODUCTION = """# Every layout against one process

Written by `python tests/support/parity.py --output docs/records/parity.md`.
`python -m pytest -m slow tests/train/test_parity.py` runs the
same cases. With `--tables` the command runs only some tables; each has commit, date and machine of its run.

A case trains {steps} steps of AdamW or of its table's optimizer (weight decay 0.1, gradients clipped to norm {clip},
learning rate {lr}) of {samples} samples with unequal numbers of loss tokens, two to four documents per row and
{objectives} objectives. It is compared with plain torch in one process, without DeepSpeed. Every case also checks that
initial weights are equal bit for bit and that every element is owned by exactly one rank.

Shown are the largest relative differences: of the loss of every objective and of the gradient norm in every step; of
every parameter's gradient (before clipping, in every step) and of every parameter after the last step, the largest
difference of its elements over its largest element. A ratio per element would mean nothing: where a sum cancels
to nearly 0, any rounding is large compared with it. Adam would turn such an element into a step of full size, unless
epsilon is above the rounding: it is 1e-3 here, the size of a typical gradient of this model.

| tolerance | loss | gradient norm | gradients | weights |
|---|---|---|---|---|
{tolerances}

Half precision is compared with fp32, not with itself. Generator and discriminator train 2 steps, because their
gradients nearly cancel where the discriminator predicts one half, and show the rounding of weights 20 times in the
third. With entities, gradients and weights may differ by 5e-5, because the sentence head has few labels.
"e2" after a number of data-parallel ranks: two of them split the experts.
"""


def page(sections: dict[str, str]) -> str:
    """The whole of docs/records/parity.md."""
    tolerances = [
        f"| {precision} | " + " | ".join(f"{value:.0e}" for value in values.values()) + " |"
        for precision, values in TOLERANCES.items()
    ]
    introduction = INTRODUCTION.format(
        steps=STEPS,
        clip=CLIP,
        lr=LR,
        samples=SAMPLES,
        objectives=OBJECTIVES,
        tolerances="\n".join(tolerances),
    )
    return "\n".join([introduction, *sections.values()])


TABLES: dict[str, list[Case]] = {
    "fp32: every combination": matrix(),
    "Dropout": DROPOUT,
    "Rotary positions and the second position": POSITIONS,
    "Norms of heads and scaled wavelengths": HEAD_NORMS,
    "Local layers, norms without a bias": LOCAL,
    "GLM on a modern body": MODERN_GLM,
    "Queries and keys of positions": DISENTANGLED,
    "Generator and discriminator": GENERATOR_AND_DISCRIMINATOR,
    "Entities beside tokens": ENTITIES,
    "Other optimizers": OPTIMIZERS,
    "Encoder and decoder": PARTS,
    "Shared by pipeline stages": SHARED_BY_STAGES,
    "Offloaded optimizer": OFFLOAD,
    "Half precision": HALF,
    "Options of other systems": OPTIONS,
    "muP": MUP,
    "XLNet's memory": WITH_MEMORY,
    "LoRA": LORA,
    "Mixtures of experts": EXPERTS,
    "Multi-token prediction": FURTHER_TOKENS,
}


def grouped(outcomes_by_layout: Iterable[list[Outcome]], precision: str) -> list[list[Outcome]]:
    rows = [[o for o in outcomes if o.case.precision == precision] for outcomes in outcomes_by_layout]
    return [row for row in rows if row]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", metavar="TxPxD", help="only these (default: all)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the page there, not to the terminal"
    )
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, metavar="TITLE", help="only these; the others of --output stay"
    )
    options = parser.parse_args(arguments)
    known = by_layout(matrix())
    for layout in options.layouts or []:
        if layout not in known:
            raise ConfigError(f"--layouts {layout} is not known; choose from {', '.join(known)}.")
    if options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: its directory does not exist; create it.")
    commit = commit_of_record() if options.output else "of no record"
    results: dict[str, list[list[Outcome]]] = {}
    for title in options.tables or TABLES:
        for layout, chosen in by_layout(TABLES[title]).items():
            if not options.layouts or layout in options.layouts:
                results.setdefault(title, []).append(outcomes_of(chosen))
                print(f"{title}: {layout}, {len(chosen)} cases", file=sys.stderr, flush=True)
    sections = {}
    if options.tables and options.output is not None and options.output.exists():
        sections = sections_of(options.output.read_text(encoding="utf-8"))
    for title, outcomes in results.items():
        for precision in TOLERANCES:
            if rows := grouped(outcomes, precision):
                name = title if precision == "fp32" else f"{title}, {precision}"
                sections[name] = section(name, rows, commit)
    text = page(sections)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    failures = [
        line for rows in results.values() for row in rows for outcome in row for line in outcome.failures()
    ]
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run_command(main)
