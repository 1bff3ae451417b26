"""A training step of a layout by counts and formulas: memory, kernels, times by the roofline, communication.

Nothing runs: the sizes of the configuration's own batches and the shapes of its parameters are counted, and each kernel
and collective of a step costs what the roofline gives it. Tests compare the figures with traces of the step itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.estimate.gpus import HOST, Gpu
from megatron_lite.estimate.memory import Peak, peak
from megatron_lite.estimate.parameters import Stage, stages
from megatron_lite.estimate.rows import Rows
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.step_costs import stage_tally
from megatron_lite.estimate.tally import Tally
from megatron_lite.model.build import model_spec
from megatron_lite.model.flops import parameter_count, step_flops

RESERVED_GIB = 3.0  # for CUDA, NCCL and fragmentation, which no count shows


def require_rows_of_one(config: Config) -> None:
    """Raise ConfigError for a configuration of two Transformers that read texts of their own."""
    if config.decoder is not None:
        raise ConfigError(
            "decoder is set, but a profile covers a single Transformer; profile the encoder (decoder=null "
            "objectives={{masked_lm: 1}}) and the decoder (its options as model, objectives={{causal: 1}}) "
            "separately."
        )


def require_one_transformer(config: Config) -> None:
    """Raise ConfigError for a configuration of two."""
    require_rows_of_one(config)
    for choice in config.objective_choices:
        if choice.section.own_model_advice is not None:
            raise ConfigError(
                f"objectives has {choice.name}, but a trace covers a single Transformer; use pretrain_glm.py "
                "--dry-run, which counts both."
            )


def with_vocabulary(config: Config) -> Config:
    """A configuration of one Transformer with the size of its vocabulary, the tokenizer's if it has none."""
    require_one_transformer(config)
    if config.model.vocab_size is not None:
        return config
    if config.tokenizer is None:
        raise ConfigError("model.vocab_size is null; set it, or set tokenizer, which determines it.")
    from data_utils.tokenizers.tokenizer import load_tokenizer

    return config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)


@dataclass(frozen=True)
class Estimate:
    """A training step, of a pipeline on the rank that has most. Times are milliseconds of a step."""

    peak: Peak
    launches: float
    kinds: dict[str, float]  # kind of kernel -> ms on the slowest rank
    collectives: dict[str, float]  # group -> calls
    collective_mb: dict[str, float]  # group -> the largest tensor of each call
    communication_ms: dict[str, float]  # group -> ms, if nothing overlaps
    host_ms: float
    roofline_ms: float
    bubble: float  # factor of both times: a pipeline's fill and drain
    rank_parameters: int  # of the fullest rank
    tokens: float  # of all ranks, without padding
    padding: float  # share of a micro-batch
    lengths: str  # to which micro-batches are padded
    flops: float  # of the model on one rank, without recomputation

    @property
    def peak_gib(self) -> float:
        return self.peak.total / 2**30

    @property
    def busy_ms(self) -> float:
        """If all communication overlaps."""
        return max(self.host_ms, self.roofline_ms)

    @property
    def step_ms(self) -> float:
        """If no communication overlaps."""
        moved = self.communication_ms
        within = sum(moved.get(group, 0.0) for group in ("tp", "pp"))
        return self.busy_ms + self.bubble * within + sum(moved.values()) - within

    def mfu(self, gpu: Gpu) -> float:
        """Share of the peak that the model's FLOPs reach in the time without communication."""
        return self.flops / self.busy_ms / gpu.peak_tflops / 1e9

    def mfu_without_overlap(self, gpu: Gpu) -> float:
        """The same in the time of a step whose communication overlaps with nothing."""
        return self.mfu(gpu) * self.busy_ms / self.step_ms

    def fits(self, gpu: Gpu) -> bool:
        return self.peak_gib + RESERVED_GIB <= gpu.memory_gib


def estimate(config: Config, processes: int, gpu: Gpu, rows: Rows) -> Estimate:
    """Args: rows: as of `average_rows`. Raises ConfigError if the processes do not fit the layout or the batch.

    Of a generator and a discriminator, which read the same rows one after another, the sum of both.
    """
    stacks = [part for part in model_spec(config).made_of(config) if isinstance(part, ModelConfig)]
    if len(stacks) == 1 or config.decoder is not None:
        return _of_stack(config, processes, gpu, rows)
    of_each = replace(rows, loss_tokens=0.0), rows  # the discriminator has no head for the vocabulary
    found = [
        _of_stack(_alone(config, stack), processes, gpu, own)
        for stack, own in zip(stacks, of_each, strict=True)
    ]
    shared = model_spec(config).count(config) / sum(parameter_count(stack) for stack in stacks)
    return _joined(found, shared)


def _alone(config: Config, model: ModelConfig) -> Config:
    """A configuration with the layout of another and a model that predicts masked tokens."""
    training = replace(config.training, loss_normalization="global_tokens", loss_weights={})
    masked = {"masked_lm": 1}
    return replace(config, model=model, training=training, objectives=masked, objective_sections={})


def _joined(found: list[Estimate], shared: float) -> Estimate:
    """Stacks one after another. Args: shared: their numbers, tables that both read counted once, by the sum of them."""

    def total(name: str) -> float:
        return sum(getattr(each, name) for each in found)

    def sums(name: str) -> dict[str, float]:
        names = dict.fromkeys(key for each in found for key in getattr(each, name))
        return {key: sum(getattr(each, name).get(key, 0.0) for each in found) for key in names}

    peaks = [vars(each.peak) for each in found]
    together = {key: sum(each[key] for each in peaks) for key in peaks[0]} | {
        "rest": max(x["rest"] for x in peaks)
    }
    for key in ("weights", "gradients", "optimizer"):
        together[key] *= shared
    first = found[0]
    return replace(
        first,
        peak=Peak(**together),
        launches=total("launches"),
        kinds=sums("kinds"),
        collectives=sums("collectives"),
        collective_mb={**found[1].collective_mb, **first.collective_mb},
        communication_ms=sums("communication_ms"),
        host_ms=total("host_ms"),
        roofline_ms=total("roofline_ms"),
        rank_parameters=round(total("rank_parameters") * shared),
        flops=total("flops"),
    )


def _of_stack(config: Config, processes: int, gpu: Gpu, rows: Rows) -> Estimate:
    sizes = Sizes(config, processes, rows, gpu.processors)
    config.phase_plan.require_ranks(sizes.dp)
    every = stages(sizes)
    chosen = _counted_stages(every)
    tallies = [stage_tally(every[place], sizes, gpu) for place in chosen]
    bubble = 1 + (sizes.pp - 1) / sizes.micro_batches
    slowest = max(tallies, key=_micros)
    micro_batches, batch = sizes.micro_batches, config.batch
    samples = batch.micro_batch_size * micro_batches
    work = (rows.tokens, rows.loss_tokens, rows.visible_keys, rows.decoder_tokens, rows.decoder_keys)
    flops = step_flops(config.model, *(int(each * samples) for each in work)) * sizes.dp / processes
    return Estimate(
        peak=max((peak(every[place], place, sizes) for place in chosen), key=lambda found: found.total),
        launches=max(_launches(tally) for tally in tallies),
        kinds={kind: micros / 1e3 for kind, micros in slowest.micros.items()},
        collectives=_most(tallies, "calls", 1.0),
        collective_mb=_most(tallies, "bytes", 1e6),
        communication_ms=_most(tallies, "ring_micros", 1e3),
        host_ms=HOST.millis(max(_launches(tally) for tally in tallies), samples * rows.length / 512) * bubble,
        roofline_ms=_micros(slowest) / 1e3 * bubble,
        bubble=bubble,
        rank_parameters=max(stage.numbers for stage in every),
        tokens=rows.tokens * samples * sizes.dp,
        padding=1 - rows.tokens * batch.micro_batch_size / sizes.all_tokens,
        lengths=", ".join(f"{length:,.0f}" for length in sorted(sizes.lengths[0])),
        flops=flops,
    )


def _counted_stages(every: list[Stage]) -> list[int]:
    """The first, the fullest inner and the last stage."""
    inner = range(1, len(every) - 1)
    fullest = [max(inner, key=lambda place: (every[place].blocks, -place))] if inner else []
    return sorted({0, *fullest, len(every) - 1})


def _micros(tally: Tally) -> float:
    return sum(tally.micros.values())


def _launches(tally: Tally) -> float:
    return tally.launches + sum(tally.calls.values())


def _most(tallies: list[Tally], name: str, unit: float) -> dict[str, float]:
    """Numbers by group, each of the rank that has most of it."""
    groups = sorted({group for tally in tallies for group in getattr(tally, name)})
    return {group: max(getattr(tally, name)[group] for tally in tallies) / unit for group in groups}
