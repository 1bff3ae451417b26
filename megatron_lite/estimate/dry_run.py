"""`pretrain_glm.py --dry-run`: memory and speed of a run on GPUs that need not be here, and the fastest layout."""

from __future__ import annotations

import textwrap

from data_utils.common.errors import ConfigError
from data_utils.loader.extent_ahead import extent_if_here
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.attention import choose, describe, with_choice
from megatron_lite.config.tree import Config
from megatron_lite.estimate.advice import (
    ParallelLayout,
    Phase,
    advise,
    advise_for_all_phases,
    is_same_recipe,
    propose_full_waves,
    propose_loss_chunks,
)
from megatron_lite.estimate.average_sequence import AverageSequence, average_sequence
from megatron_lite.estimate.gpus import HOST, Gpu, gpu_named
from megatron_lite.estimate.step_estimate import (
    RESERVED_GIB,
    Estimate,
    estimate,
    require_no_decoder_config,
)
from megatron_lite.model.build import model_spec

_WIDTH, _INDENT = 116, 18  # columns of a line of the report, and of its continuation


def dry_run(config: Config, processes: int, gpu_name: str) -> None:
    """Print the report and the advice for a number of processes. Raises: ConfigError."""
    if processes < 1:
        raise ConfigError(f"--dry-run is {processes}; it must be a number of processes, at least 1.")
    require_no_decoder_config(config)
    if config.model.vocab_size is None:
        if config.tokenizer is None:
            raise ConfigError("model.vocab_size is null; set it, or set tokenizer, which determines it.")
        config = config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)
    gpu = gpu_named(gpu_name)
    attention = describe(config, choose(config, gpu.capability))
    config = with_choice(config, gpu.capability)
    config.deepspeed_options(config.parallel.data_parallel_size(processes))
    phase_plan = config.phase_plan
    samples = phase_plan.consumed(config.training.steps)
    # A list: a mixture that cannot be is an error before the report.
    reading = list(
        extent_if_here(
            config.data,
            config.training.seed,
            samples,
            phase_plan.largest_batch,
            config.objective_choices,
            phase_plan.samples,
        )
    )
    phases: list[Phase] = []
    for phase, line in zip(phase_plan.alone(), phase_plan.lines() or [""], strict=True):
        sequence = average_sequence(phase)
        phases.append((phase, sequence, estimate(phase, processes, gpu, sequence)))
        print(f"{line}\n" * bool(line) + dry_run_report(phase, processes, gpu, phases[-1][2]))
    print(folded(f"attention         {attention}"))
    for line in reading:
        print(folded(f"text              {line}"), flush=True)
    advised = [
        _advice(number * (len(phases) > 1), *phase, processes, gpu) for number, phase in enumerate(phases, 1)
    ]
    if len(phases) > 1:
        print("\n" + folded(f"all phases        {advise_for_all_phases(phases, advised, processes, gpu)}"))


def _advice(
    number: int, config: Config, sequence: AverageSequence, current: Estimate, processes: int, gpu: Gpu
) -> tuple[ParallelLayout | None, Estimate] | None:
    """Print proposals and `advise`, which it returns. Args: number: of the phase; 0 = the run has none."""
    name, start = f" {number}" if number else "", "" if number else "\n"
    full_waves = propose_full_waves(config, processes, gpu, sequence, current)
    if full_waves is not None:
        settings, other = full_waves
        gain = other.tokens / other.step_ms * current.step_ms / current.tokens - 1
        mfu = " -> ".join(f"{one.mfu_without_overlap(gpu):.1%}" for one in (current, other))
        recipe = "same training recipe" if is_same_recipe(settings, config) else "another recipe"
        print(
            folded(
                f"fills the GPU{name:5}{settings}: {gain:+.1%} tokens/s, MFU {mfu} without overlap, micro-batches "
                f"of {other.lengths}; {recipe}"
            )
        )
    loss_chunks = propose_loss_chunks(config, processes, gpu, sequence, current)
    if loss_chunks is not None:
        setting, other = loss_chunks
        print(
            folded(
                f"less memory{name:7}{setting}: {current.peak_gib:.2f} -> {other.peak_gib:.2f} GiB peak, step time "
                f"{other.step_ms / current.step_ms - 1:+.1%}"
            )
        )
    advised = advise(config, processes, gpu, sequence, current)
    title = f"{start}{f'advice, phase{name}' if number else 'advice':18}"
    if advised is None:
        print(f"{title}no layout fits {processes} x {gpu.name}; use more GPUs.")
    elif advised[0] is None:
        print(f"{title}keep this layout: no other layout that fits is faster.")
    else:
        print(f"{title}{advised[0].settings()}{start}")
        if not number:
            print(dry_run_report(advised[0].applied(config), processes, gpu, advised[1]))
    return advised


def dry_run_report(config: Config, processes: int, gpu: Gpu, result: Estimate) -> str:
    """The report of one layout, for a terminal."""
    parallel = config.parallel
    dp = parallel.data_parallel_size(processes)
    passes = config.batch.accumulation_steps(dp)
    fit = "fits" if result.fits(gpu) else "DOES NOT FIT"
    memory = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in vars(result.peak).items() if size)
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
            f"device            {gpu.describe(config.training.attention)}; host overhead {HOST.operation_us:g} us "
            f"per operation, {HOST.public_call_us:g} us more per forward launch of FlashAttention without dropout, and "
            f"{HOST.row_us:g} us per sequence of 512 tokens",
            f"memory            {result.peak_gib:.2f} GiB peak on the largest rank ({memory}); with "
            f"{RESERVED_GIB:g} GiB for CUDA, NCCL and fragmentation it\N{NO-BREAK SPACE}{fit} "
            f"{gpu.memory_gib:g} GiB",
            f"step              about {result.tokens:,.0f} tokens, micro-batches of {result.lengths}; GPU "
            f"{result.roofline_ms:,.0f} ms, host {result.host_ms:,.0f} ms for {result.launches:,.0f} "
            f"operations, communication {sum(result.communication_ms.values()):,.0f} ms",
            _speed(config, gpu, result),
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
    """Tokens/s and MFU if all communication overlaps, and if none does."""
    least = result.step_ms
    slow, fast = (result.tokens / ms * 1e3 for ms in (least, result.busy_ms))
    hours = config.training.steps * least / 3600e3
    duration = (
        f"{hours / 24:.3g} days"
        if hours >= 48
        else f"{hours:.3g} hours"
        if hours >= 2
        else f"{hours * 60:.3g} minutes"
    )
    return (
        f"speed             {slow:,.0f} to {fast:,.0f} tokens/s, MFU {result.mfu_without_overlap(gpu):.1%} "
        f"to {result.mfu(gpu):.1%} without and with full overlap of communication; "
        f"{config.training.steps:,} steps take at most {duration}"
    )
