"""`pretrain_glm.py --dry-run`: memory and speed of a run on GPUs that need not be here, and the fastest layout."""

from __future__ import annotations

from data_utils.common.errors import ConfigError
from data_utils.loader.extent_ahead import extent_if_here
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.estimate.advice import (
    ParallelLayout,
    Phase,
    advise,
    dry_run_report,
    folded,
    for_all,
    fuller,
    in_parts,
    is_same_recipe,
)
from megatron_lite.estimate.gpus import Gpu, gpu_named
from megatron_lite.estimate.rows import Rows, average_rows
from megatron_lite.estimate.step_estimate import Estimate, estimate, require_rows_of_one


def dry_run(config: Config, processes: int, gpu_name: str) -> None:
    """Print the report and the advice for a number of processes. Raises: ConfigError."""
    if processes < 1:
        raise ConfigError(f"--dry-run is {processes}; it must be a number of processes, at least 1.")
    require_rows_of_one(config)
    if config.model.vocab_size is None:
        if config.tokenizer is None:
            raise ConfigError("model.vocab_size is null; set it, or set tokenizer, which determines it.")
        config = config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)
    gpu = gpu_named(gpu_name)
    config.deepspeed_options(config.parallel.data_parallel_size(processes))
    phase_plan = config.phase_plan
    samples = phase_plan.consumed(config.training.steps)
    drawn = phase_plan.largest_batch, phase_plan.samples, config.objective_choices
    reading = extent_if_here(config.data, config.training.seed, samples, *drawn)
    phases: list[Phase] = []
    for each, line in zip(phase_plan.alone(), phase_plan.lines() or [""], strict=True):
        rows = average_rows(each)
        phases.append((each, rows, estimate(each, processes, gpu, rows)))
        print(f"{line}\n" * bool(line) + dry_run_report(each, processes, gpu, phases[-1][2]))
    for line in reading:
        print(folded(f"text              {line}"), flush=True)
    advised = [
        _advice(number * (len(phases) > 1), *each, processes, gpu) for number, each in enumerate(phases, 1)
    ]
    if len(phases) > 1:
        print("\n" + folded(f"all phases        {for_all(phases, advised, processes, gpu)}"))


def _advice(
    number: int, config: Config, rows: Rows, given: Estimate, processes: int, gpu: Gpu
) -> tuple[ParallelLayout | None, Estimate] | None:
    """As `advise`, printed. Args: number: of the phase; 0 = the run has none."""
    name, start = f" {number}" if number else "", "" if number else "\n"
    fills = fuller(config, processes, gpu, rows, given)
    if fills is not None:
        settings, other = fills
        gain = other.tokens / other.step_ms * given.step_ms / given.tokens - 1
        mfu = " -> ".join(f"{one.mfu_without_overlap(gpu):.1%}" for one in (given, other))
        recipe = "same training recipe" if is_same_recipe(settings, config) else "another recipe"
        print(
            folded(
                f"fills the GPU{name:5}{settings}: {gain:+.1%} tokens/s, MFU {mfu} without overlap, padding "
                f"{given.padding:.1%} -> {other.padding:.1%} to {other.lengths}; {recipe}"
            )
        )
    smaller = in_parts(config, processes, gpu, rows, given)
    if smaller is not None:
        setting, other = smaller
        print(
            folded(
                f"less memory{name:7}{setting}: {given.peak_gib:.2f} -> {other.peak_gib:.2f} GiB peak, step time "
                f"{other.step_ms / given.step_ms - 1:+.1%}"
            )
        )
    advised = advise(config, processes, gpu, rows, given)
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
