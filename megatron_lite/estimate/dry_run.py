"""`pretrain_glm.py --dry-run`: memory and speed of a run on GPUs that need not be here, and the fastest layout."""

from __future__ import annotations

import os
import textwrap

from data_utils.common.errors import ConfigError
from data_utils.loader.mixtures_ahead import corpus_report_if_here
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.attention import choose, describe, with_choice
from megatron_lite.config.tree import Config
from megatron_lite.estimate.advice import (
    ParallelLayout,
    Phase,
    advise,
    advise_for_all_phases,
    propose_loss_chunks,
)
from megatron_lite.estimate.average_sequence import AverageSequence, average_sequence
from megatron_lite.estimate.gpus import Gpu, gpu_named
from megatron_lite.estimate.step_estimate import (
    EFFICIENCY,
    RESERVED_GIB,
    Estimate,
    estimate,
    require_no_decoder_config,
)
from megatron_lite.transformer.build import model_spec

_WIDTH, _INDENT = 116, 18  # columns of a line of the report, and of its continuation


def dry_run(config: Config, processes: int, gpu_name: str, efficiency: float = EFFICIENCY) -> None:
    """Print the report and the advice for a number of processes. Raises: ConfigError.

    Args: efficiency: share of the GPU's peak that computation reaches.
    """
    if not 0 < efficiency <= 1:
        raise ConfigError(f"--efficiency is {efficiency:g}; it must be above 0 and at most 1.")
    if processes < 1:
        raise ConfigError(f"--dry-run is {processes}; it must be a number of processes, at least 1.")
    require_no_decoder_config(config)
    tokenizer, size = config.tokenizer, config.model.vocab_size
    if tokenizer is not None and (size is None or os.path.exists(tokenizer.path)):
        # Refuses another size of the model, as training does.
        config = config.with_vocab_size(load_tokenizer(tokenizer).vocab_size)
    elif size is None:
        raise ConfigError("model.vocab_size is null; set it, or set tokenizer, which determines it.")
    gpu = gpu_named(gpu_name)
    attention = describe(config, choose(config, gpu.capability))
    config = with_choice(config, gpu.capability)
    config.deepspeed_options(config.parallel.data_parallel_size(processes))
    phase_plan = config.phase_plan
    samples = phase_plan.consumed(config.training.steps)
    # A list: a mixture that cannot be is an error before the report.
    reading = list(
        corpus_report_if_here(
            config.data,
            config.training.seed,
            samples,
            phase_plan.largest_batch,
            config.objective_choices,
            phase_plan.samples,
            config.sample_unit,
        )
    )
    phases: list[Phase] = []
    for phase, line in zip(phase_plan.alone(), phase_plan.lines() or [""], strict=True):
        sequence = average_sequence(phase)
        phases.append((phase, sequence, estimate(phase, processes, gpu, sequence, efficiency)))
        print(f"{line}\n" * bool(line) + dry_run_report(phase, processes, gpu, phases[-1][2], efficiency))
    print(folded(f"attention         {attention}"))
    for line in reading:
        print(folded(f"text              {line}"), flush=True)
    advised = [
        _advice(number * (len(phases) > 1), *phase, processes, gpu, efficiency)
        for number, phase in enumerate(phases, 1)
    ]
    if len(phases) > 1:
        whole = advise_for_all_phases(phases, advised, processes, gpu, efficiency)
        print("\n" + folded(f"all phases        {whole}"))


def _advice(
    number: int,
    config: Config,
    sequence: AverageSequence,
    current: Estimate,
    processes: int,
    gpu: Gpu,
    efficiency: float,
) -> tuple[ParallelLayout | None, Estimate] | None:
    """Print proposals and `advise`, which it returns. Args: number: of the phase; 0 = the run has none."""
    name, start = f" {number}" if number else "", "" if number else "\n"
    loss_chunks = propose_loss_chunks(config, processes, gpu, sequence, current)
    if loss_chunks is not None:
        setting, other = loss_chunks
        print(
            folded(
                f"less memory{name:7}{setting}: {current.peak_gib:.2f} -> {other.peak_gib:.2f} GiB peak, for the LM "
                "head's product once more"
            )
        )
    advised = advise(config, processes, gpu, sequence, current, efficiency)
    title = f"{start}{f'advice, phase{name}' if number else 'advice':18}"
    if advised is None:
        print(f"{title}no layout fits {processes} x {gpu.name}; use more GPUs.")
    elif advised[0] is None:
        print(f"{title}keep this layout: no other one that fits is clearly faster.")
    else:
        print(f"{title}{advised[0].settings()}{start}")
        if not number:
            print(dry_run_report(advised[0].applied(config), processes, gpu, advised[1], efficiency))
    return advised


def dry_run_report(
    config: Config, processes: int, gpu: Gpu, result: Estimate, efficiency: float = EFFICIENCY
) -> str:
    """The report of one layout, for a terminal."""
    parallel = config.parallel
    dp = parallel.data_parallel_size(processes)
    passes = config.batch.accumulation_steps(dp)
    fit = "fits" if result.fits(gpu) else "DOES NOT FIT"
    memory = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in vars(result.peak).items() if size)
    sent = ", ".join(f"{group} {size:,.0f} MB" for group, size in result.communication_mb.items()) or "none"
    bubble = f", x {result.bubble:.3g} for the pipeline's fill and drain" if result.bubble > 1 else ""
    return "\n".join(
        folded(line)
        for line in [
            f"parameters        {model_spec(config).described_count(config)}; {result.rank_parameters:,} on the "
            "largest rank",
            f"layout            {processes} process{'es' * (processes > 1)}: "
            f"pipeline {parallel.pipeline_parallel_size} x data {dp} x tensor "
            f"{parallel.tensor_parallel_size}, ZeRO {parallel.zero_stage}, recompute "
            f"{config.training.recompute}, {passes} micro-batch{'es' * (passes > 1)} of "
            f"{config.batch.micro_batch_size} x {config.row_length} tokens per step",
            f"memory            {result.peak_gib:.2f} GiB peak on the largest rank ({memory}); with "
            f"{RESERVED_GIB:g} GiB for CUDA, NCCL and fragmentation it\N{NO-BREAK SPACE}{fit} "
            f"{gpu.memory_gib:g} GiB",
            f"step              about {result.tokens:,.0f} tokens; computation {result.compute_ms:,.0f} ms{bubble}, "
            f"communication {sum(result.communication_ms.values()):,.0f} ms ({sent}), of which the step waits for "
            f"{result.waiting_ms:,.0f} ms",
            _speed(config, gpu, result),
            f"assumed           {gpu.name}: computation at {efficiency:g} of {gpu.peak_tflops:g} TFLOP/s "
            f"(--efficiency), {gpu.link_gbs:g} GB/s within a node, {gpu.network_gbs:g} GB/s per GPU between nodes; "
            "nothing is measured",
        ]
    )


def folded(line: str) -> str:
    """A line of the report, wrapped. A no-break space keeps two words in one line."""
    indent = " " * _INDENT
    text = textwrap.fill(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return text.replace("\N{NO-BREAK SPACE}", " ")


def _speed(config: Config, gpu: Gpu, result: Estimate) -> str:
    hours = config.training.steps * result.step_ms / 3600e3
    duration = (
        f"{hours / 24:.3g} days"
        if hours >= 48
        else f"{hours:.3g} hours"
        if hours >= 2
        else f"{hours * 60:.3g} minutes"
    )
    return (
        f"speed             about {result.tokens / result.step_ms * 1e3:,.0f} tokens/s, MFU {result.mfu(gpu):.1%}; "
        f"{config.training.steps:,} steps take about {duration}"
    )
