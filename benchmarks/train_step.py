#!/usr/bin/env python3
"""Speed of a training step: GLM compared with a dense version of itself and two transformers models.

A step is the forward and backward pass of one micro-batch, without dropout; the optimizer has its own row,
because it costs the same for every variant of one size. The variants take turns (A B C A B C ...), so that a
busy machine slows all of them, and medians are reported. Matrix multiplications take a turn as well: the
fractions in the table are of what this machine multiplied during the same run.

`--layers N` times 1 and N blocks and extends the line through both to the full depth: blocks are identical,
and a short model alone would overstate the head, which is where GLM saves most.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.common.batch_fields import DOC, ORD, TARGETS
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.memory import keep_freed_memory
from data_utils.loader.loader import collate
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.config.model import ModelConfig
from megatron_lite.telemetry.peak_flops import known_peak_tflops
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import step_flops
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.lengths import builds_kernels, few_lengths
from megatron_lite.transformer.loss import cross_entropy
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.tensor_parallel import linear
from megatron_lite.transformer.transformer import Transformer

SEQUENCE_LENGTH = 512
VOCAB_SIZE = 30524  # BERT's WordPiece with sop and eop
SPECIAL = SpecialTokens(
    cls=101, sep=102, mask=103, smask=103, gmask=103, sop=30522, eop=30523, eos=0, pad=0, unk=100, dblock=103
)
SHAPES = {"tiny": (4, 256, 4), "base": (12, 768, 12), "large": (24, 1024, 16)}  # layers, hidden size, heads
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MATMUL_SHAPE = (2048, 1024, 4096)  # rows, in, out: GLM-large's MLP on four samples
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


@dataclass(frozen=True)
class Work:
    """What one step of a variant has to do."""

    tokens: int  # source tokens of the text, without padding and without what an objective adds
    useful_flops: float  # model FLOPs: no padding, only visible keys, head on rows with loss only
    executed_flops: float  # what the variant computes in its matmuls and attention


@dataclass(frozen=True)
class Variant:
    name: str
    step: Callable[[], Any]
    work: Work


@dataclass(frozen=True)
class Row:
    """One line of the result. Rates in TFLOP/s of useful FLOPs."""

    shape: str
    dtype: str
    variant: str
    seconds: float
    tokens_per_second: float
    tflops: float
    of_project_matmul: float | None  # fraction of the measured rate of megatron_lite.linear
    of_native_matmul: float | None  # fraction of the measured rate of torch's own linear
    glm_speedup: float | None  # GLM's tokens/s over this variant's
    flop_bound: float | None  # the speed-up if both ran at the same FLOP/s


def make_batch(samples: int, number: int = 0) -> np.ndarray:
    """Random text through the real collation: int32 [samples, fields, row length], one document per sample.

    Args: number: of the batch; each has other spans, and so another number of tokens.
    """
    objective = BlankInfilling(BlankInfillingConfig(), Vocabulary(SPECIAL, 3000), 1, SEQUENCE_LENGTH)
    # A window of one fresh document holds sequence_length - 1 tokens; the objective adds CLS in front.
    lengths = np.full(samples, SEQUENCE_LENGTH - 1)
    text = np.random.default_rng(0).integers(1000, 30000, lengths.sum())
    numbers = np.arange(samples) + number * samples
    return collate(objective, text, lengths, np.ones(samples, np.int64), numbers)


def model_config(shape: str, layers: int) -> ModelConfig:
    _, hidden_size, heads = SHAPES[shape]
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        vocab_size=VOCAB_SIZE,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        output_dropout=0.0,
    )


def training_step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Forward and backward; gradients are freed first, as an engine does after each optimizer step."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


def glm_variants(
    config: ModelConfig, samples: int, dtype: torch.dtype, device: torch.device, batches: int = 1
) -> list[Variant]:
    """Ours, and the same weights with a dense mask and logits on every row. Args: batches: that take turns."""
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), config, seed=1)
    model.to(device, dtype)
    made = [make_batch(samples, number) for number in range(batches)]
    rows, length = made[0].shape[0], made[0].shape[2]
    multiple = few_lengths(rows * length, device, dtype)  # as in training
    few_counts = builds_kernels(device, dtype)
    ours, dense = (
        [MicroBatch.from_batch(Batch(x), device, config, kernel=kernel, **options) for x in made]
        for kernel, options in (("auto", {"multiple": multiple, "few_counts": few_counts}), ("dense", {}))
    )
    loss_rows = statistics.mean(Batch(x).loss_tokens for x in made)
    real = statistics.mean(Batch(x).tokens for x in made)
    useful = step_flops(config, real, loss_rows, statistics.mean(Batch(x).visible_keys for x in made))
    wanted = [
        tuple(
            torch.from_numpy(part.reshape(-1)).to(device)
            for part in (x[:, TARGETS].astype(np.int64), Batch(x).weights)
        )
        for x in made
    ]
    of_ours, of_dense = itertools.cycle(ours), itertools.cycle(zip(dense, wanted, strict=True))

    def our_loss() -> torch.Tensor:
        inputs = next(of_ours)
        return model(inputs)[0] / len(inputs.targets)

    def dense_loss() -> torch.Tensor:
        i, (targets, weights) = next(of_dense)
        hidden = model.hidden_states(i.tokens, i.ids, i.plan)
        losses = cross_entropy(model.logits(hidden), targets)
        return (losses * weights).sum() / torch.count_nonzero(weights)

    tokens = rows * SEQUENCE_LENGTH
    computed, keys = (
        statistics.mean(of(x) for x in arrays)
        for of, arrays in ((computed_rows, ours), (computed_keys, made))
    )
    executed = step_flops(config, computed, loss_rows, keys)
    dense_executed = step_flops(config, rows * length, rows * length, rows * length * length)
    return [
        Variant("GLM", training_step(model, our_loss), Work(tokens, useful, executed)),
        Variant("GLM dense", training_step(model, dense_loss), Work(tokens, useful, dense_executed)),
    ]


def computed_rows(inputs: MicroBatch) -> int:
    """Rows that the blocks run on."""
    return inputs.tokens.numel()


def computed_keys(batch: np.ndarray) -> int:
    """Query-key pairs that CpuPlan computes: the causal part in full tiles, so all of part B's keys."""
    doc, order = batch[:, DOC], batch[:, ORD]
    lengths, contexts = (doc >= 0).sum(1), ((doc >= 0) & (order == 0)).sum(1)
    return int((contexts * contexts + (lengths - contexts) * lengths).sum())


def transformers_variants(
    config: ModelConfig, samples: int, dtype: torch.dtype, device: torch.device
) -> list[Variant]:
    """BERT masked-LM and GPT-2 causal-LM of the same size, random weights, sdpa attention."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()  # it reports a missing loss_type, whose default is the one wanted

    size, layers, heads = config.hidden_size, config.num_layers, config.num_attention_heads
    bert_config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * size,
        max_position_embeddings=SEQUENCE_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    gpt2_config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=size,
        n_layer=layers,
        n_head=heads,
        n_positions=SEQUENCE_LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    for other in (bert_config, gpt2_config):
        other._attn_implementation = "sdpa"
    tokens, n = samples * SEQUENCE_LENGTH, SEQUENCE_LENGTH
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (samples, n), generator=generator).to(device)
    masked = torch.where(torch.rand(samples, n, generator=generator).to(device) < 0.15, ids, -100)
    full = step_flops(config, tokens, tokens, tokens * n)
    bert_useful = step_flops(config, tokens, int((masked >= 0).sum()), tokens * n)
    causal = step_flops(config, tokens, tokens, tokens * (n + 1) // 2)
    bert = BertForMaskedLM(bert_config).to(device, dtype).train()
    gpt2 = GPT2LMHeadModel(gpt2_config).to(device, dtype).train()
    return [
        Variant(
            "transformers BERT",
            training_step(bert, lambda: bert(ids, labels=masked).loss),
            Work(tokens, bert_useful, full),
        ),
        Variant(
            "transformers GPT-2",
            training_step(gpt2, lambda: gpt2(ids, labels=ids).loss),
            Work(tokens, causal, causal),
        ),
    ]


def matmul_variants(dtype: torch.dtype, device: torch.device) -> list[Variant]:
    """One large matmul by torch and by the project's linear, in the step's dtype and threads."""
    rows, inner, outer = MATMUL_SHAPE
    x, weight = (
        torch.randn(rows, inner, device=device).to(dtype),
        torch.randn(outer, inner, device=device).to(dtype),
    )
    work = Work(0, 2.0 * rows * inner * outer, 2.0 * rows * inner * outer)

    def repeated(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        @torch.no_grad()
        def step() -> None:
            multiply(x, weight)

        return step

    return [
        Variant("matmul, torch", repeated(F.linear), work),
        Variant("matmul, project", repeated(linear), work),
    ]


def optimizer_variant(config: ModelConfig, device: torch.device) -> Variant:
    """AdamW on fp32 weights of the model's size, the engine's optimizer without DeepSpeed."""
    model = Transformer(config).to(device)
    initialize_parameters(model.named_parameters(), config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return Variant("AdamW step", optimizer.step, Work(0, 0.0, 0.0))


def measure(
    variants: list[Variant], repeats: int, clock: str, device: torch.device, label: str
) -> list[float]:
    """Median seconds of each variant; they take turns, after one untimed round."""
    now = CLOCKS[clock]
    seconds: list[list[float]] = [[] for _ in variants]
    rounds = tqdm(range(repeats + 1), desc=label, leave=False, disable=None)
    for turn in rounds:
        for variant, times in zip(variants, seconds, strict=True):
            start = now()
            variant.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times.append(now() - start)
    return [statistics.median(times) for times in seconds]


def all_variants(config: ModelConfig, options: argparse.Namespace) -> list[Variant]:
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    variants = matmul_variants(dtype, device) + glm_variants(
        config, options.micro_batch, dtype, device, options.batches
    )
    if not options.no_transformers:
        variants += transformers_variants(config, options.micro_batch, dtype, device)
    if options.optimizer:
        variants.append(optimizer_variant(config, device))
    return variants


def extend(low: float, high: float, timed_layers: int, layers: int) -> float:
    """The line through (1 layer, low) and (timed_layers, high) at `layers`."""
    return low + (high - low) * (layers - 1) / (timed_layers - 1)


def measure_shape(shape: str, options: argparse.Namespace) -> list[Row]:
    layers = SHAPES[shape][0]
    timed = min(options.layers or layers, layers)
    depths = [layers] if timed == layers else [1, timed]
    # Both depths take turns in one list, so that their difference is as good as a ratio.
    groups = [all_variants(model_config(shape, depth), options) for depth in depths]
    device = torch.device(options.device)
    seconds = measure([v for group in groups for v in group], options.repeats, options.clock, device, shape)
    if len(groups) == 1:
        return make_rows(shape, options.dtype, groups[0], seconds)
    low, high = groups
    low_seconds, high_seconds = seconds[: len(low)], seconds[len(low) :]
    variants, extended = [], []
    for one, many, t_one, t_many in zip(low, high, low_seconds, high_seconds, strict=True):
        is_matmul = one.name.startswith("matmul")
        depth = 1 if is_matmul else layers
        flops = {
            name: extend(getattr(one.work, name), getattr(many.work, name), timed, depth)
            for name in ("useful_flops", "executed_flops")
        }
        variants.append(replace(many, work=replace(many.work, **flops)))
        extended.append(
            statistics.mean((t_one, t_many)) if is_matmul else extend(t_one, t_many, timed, depth)
        )
    return make_rows(shape, options.dtype, variants, extended)


def make_rows(shape: str, dtype: str, variants: list[Variant], seconds: list[float]) -> list[Row]:
    of = {variant.name: (variant.work, t) for variant, t in zip(variants, seconds, strict=True)}
    native, project = (
        of[name][0].useful_flops / of[name][1] for name in ("matmul, torch", "matmul, project")
    )
    glm, glm_seconds = of["GLM"]
    rows = []
    for name, (work, t) in of.items():
        rate, is_model = work.useful_flops / t, work.tokens > 0
        is_other = is_model and work is not glm
        rows.append(
            Row(
                shape=shape,
                dtype=dtype,
                variant=name,
                seconds=t,
                tokens_per_second=work.tokens / t,
                tflops=rate / 1e12,
                of_project_matmul=rate / project if is_model else None,
                of_native_matmul=rate / native if is_model else None,
                glm_speedup=t / glm_seconds * glm.tokens / work.tokens if is_other else None,
                flop_bound=work.executed_flops / glm.executed_flops * glm.tokens / work.tokens
                if is_other
                else None,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| shape | variant | s/step | tokens/s | TFLOP/s | of project matmul | of torch matmul "
        "| GLM is faster by | bound by FLOPs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [_format(x, "{:.0%}") for x in (row.of_project_matmul, row.of_native_matmul)]
        ratios = [_format(x, "{:.2f}x") for x in (row.glm_speedup, row.flop_bound)]
        speed = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else ""
        flops = f"{row.tflops:.3g}" if row.tflops else ""
        cells = [row.shape, row.variant, f"{row.seconds:.3g}", speed, flops, *shares, *ratios]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)


def mfu_lines(rows: list[Row], device: torch.device) -> list[str]:
    """GLM's model FLOPs utilisation against the data sheet of a known GPU."""
    if device.type != "cuda":
        return []
    name = torch.cuda.get_device_name(device)
    peak = known_peak_tflops(name)
    if peak is None:
        return [f"no data-sheet peak is known for {name}: no MFU"]
    return [f"{row.shape} GLM: MFU {row.tflops / peak:.1%} of {name}" for row in rows if row.variant == "GLM"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="(default: all)")
    add("--dtype", default="bf16", choices=DTYPES, help="of weights and activations (default: bf16)")
    add("--micro-batch", type=int, default=4, help="samples per step (default: 4)")
    add(
        "--batches",
        type=int,
        default=8,
        help="GLM's batches of different lengths, which take turns; 1 = the same again and again (default: 8)",
    )
    add(
        "--layers",
        type=int,
        help="time 1 and this many blocks and extend to the full depth (default: full depth)",
    )
    add("--repeats", type=int, default=3, help="timed rounds; the median counts (default: 3)")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    add(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="process: CPU seconds of this process, for one thread on a shared machine (default: wall)",
    )
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--optimizer", action="store_true", help="add a row for the AdamW step")
    add("--no-transformers", action="store_true", help="leave the transformers models out")
    add("--json", type=Path, metavar="FILE", help="also write the rows there")
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    check_at_least(options, 1, "micro_batch", "batches", "repeats", "threads")
    check_places(result=options.json)
    if options.layers is not None and options.layers < 2:
        raise ConfigError(f"--layers is {options.layers}; it must be at least 2, a slope needs two depths.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu.")
    if options.clock == "process" and (options.device == "cuda" or options.threads > 1):
        raise ConfigError(
            "--clock process counts CPU time of one thread; use it with --threads 1 on the CPU."
        )


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    check_options(options)
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # for every variant
    rows = [row for shape in options.shapes for row in measure_shape(shape, options)]
    depth = "full depth" if options.layers is None else f"extended from 1 and {options.layers} layers"
    print(
        f"{options.dtype}, {options.device}, {options.threads} threads, micro-batch {options.micro_batch} x "
        f"{SEQUENCE_LENGTH} source tokens, {options.batches} batches, {depth}, median of {options.repeats}, "
        f"{options.clock} clock, torch {torch.__version__}\n"
    )
    print(table(rows))
    for line in mfu_lines(rows, torch.device(options.device)):
        print(line)
    if options.json:
        write_json(options.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    run_command(main)
