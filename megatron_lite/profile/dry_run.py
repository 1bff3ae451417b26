"""`pretrain_glm.py --dry-run`: memory and speed of a run on GPUs that need not be here, and the fastest layout."""

from __future__ import annotations

from data_utils.base.errors import ConfigError
from data_utils.samples.extent import extent_if_here
from data_utils.text.tokenizers import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.profile.advice import advise, dry_run_report, fuller
from megatron_lite.profile.estimate import estimate, require_one_transformer
from megatron_lite.profile.gpus import gpu_named
from megatron_lite.profile.rows import average_rows


def dry_run(config: Config, processes: int, gpu_name: str) -> None:
    """Print the report and the advice for a number of processes. Raises: ConfigError."""
    if processes < 1:
        raise ConfigError(f"--dry-run is {processes}; it must be a number of processes, at least 1.")
    require_one_transformer(config)
    if config.model.vocab_size is None:
        if config.tokenizer is None:
            raise ConfigError("model.vocab_size is null; set it, or the tokenizer whose size it takes.")
        config = config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)
    gpu = gpu_named(gpu_name)
    config.deepspeed_options(config.parallel.data_parallel_size(processes))
    plan = config.plan
    samples = plan.consumed(config.training.steps)
    reading = extent_if_here(config.data, config.training.seed, samples, plan.largest_batch, plan.samples)
    estimates = []
    for each, line in zip(plan.alone(), plan.lines() or [""], strict=True):
        rows = average_rows(each)
        estimates.append((estimate(each, processes, gpu, rows), each, rows))
        print(f"{line}\n" * bool(line) + dry_run_report(each, processes, gpu, estimates[-1][0]))
    # A layout for it fits all phases.
    given, config, rows = max(estimates, key=lambda phase: phase[0].peak_gib)
    for line in reading:
        print(f"text              {line}", flush=True)
    fills = fuller(config, processes, gpu, rows, given)
    if fills is not None:
        settings, other = fills
        gain = other.tokens / other.step_ms * given.step_ms / given.tokens - 1
        print(
            f"fills the GPU     {settings}: {gain:+.0%} tokens/s, {other.padding:.1%} padding; another recipe"
        )
    advised = advise(config, processes, gpu, rows, given)
    if advised is None:
        print(f"\nadvice            no layout fits {processes} x {gpu.name}; use more GPUs.")
        return
    layout, found = advised
    if layout is None:
        print("\nadvice            keep this layout: no other one that fits is faster.")
        return
    print(f"\nadvice            {layout.settings()}\n")
    print(dry_run_report(layout.applied(config), processes, gpu, found))
