"""Memory and time of a training step on GPUs, from counts and formulas.

Nothing runs: the sizes of the configuration's batches and the shapes of its parameters are counted, and each kernel and
collective of a step takes the time that the roofline gives it. Tests compare the counts with traces of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.rules import alone
from megatron_lite.config.tree import Config
from megatron_lite.estimate.average_sequence import AverageSequence
from megatron_lite.estimate.gpus import HOST, Gpu
from megatron_lite.estimate.memory import PeakMemory, peak_memory
from megatron_lite.estimate.parameters import stages
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.step_costs import stage_tally
from megatron_lite.estimate.tally import Tally
from megatron_lite.model.build import model_spec
from megatron_lite.model.flops import parameter_count, step_flops

RESERVED_GIB = 3.0  # for CUDA, NCCL and fragmentation, which are not counted: an allowance, not measured


def require_no_decoder_config(config: Config) -> None:
    """Raise ConfigError for an encoder and a decoder that read separate texts (OPTIMUS)."""
    if config.decoder is not None:
        nothing = "decoder=null decoder_tokenizer=null"
        raise ConfigError(
            f"decoder is set, but a profile covers a single Transformer; profile the encoder with {nothing} "
            f"{alone(config, 'masked_lm')} masked_lm.next_sentence=false, and the decoder, its options as model, with "
            f"{nothing} {alone(config, 'causal')}."
        )


def require_one_transformer(config: Config) -> None:
    """Raise ConfigError for a configuration of two Transformers."""
    require_no_decoder_config(config)
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
    """A training step; in a pipeline, of the rank with the largest figure. Times are milliseconds per step."""

    peak: PeakMemory
    launches: float
    kernel_ms: dict[str, float]  # type of kernel -> ms on the slowest rank
    collectives: dict[str, float]  # group -> number of collectives
    collective_mb: dict[str, float]  # group -> MB of the largest tensor of each, summed
    communication_ms: dict[str, float]  # group -> ms, if nothing overlaps
    host_ms: float
    roofline_ms: float
    bubble: float  # factor in host_ms and roofline_ms: a pipeline's fill and drain
    rank_parameters: int  # of the fullest rank
    tokens: float  # of all ranks, without padding
    lengths: str  # tokens to which micro-batches are padded
    flops: float  # of the model on one rank, without recomputation

    @property
    def peak_gib(self) -> float:
        return self.peak.total / 2**30

    @property
    def busy_ms(self) -> float:
        """Time of a step if all communication overlaps."""
        return max(self.host_ms, self.roofline_ms)

    @property
    def step_ms(self) -> float:
        """Time of a step if no communication overlaps."""
        # Tensor and pipeline communication is within a micro-batch, so a pipeline's bubble lengthens it too.
        within = sum(self.communication_ms.get(group, 0.0) for group in ("tp", "pp"))
        return self.busy_ms + self.bubble * within + sum(self.communication_ms.values()) - within

    def mfu(self, gpu: Gpu) -> float:
        """Share of the peak that the model's FLOPs reach in the time without communication."""
        return self.flops / self.busy_ms / gpu.peak_tflops / 1e9

    def mfu_without_overlap(self, gpu: Gpu) -> float:
        """The same in the time of a step whose communication overlaps with nothing."""
        return self.mfu(gpu) * self.busy_ms / self.step_ms

    def fits(self, gpu: Gpu) -> bool:
        return self.peak_gib + RESERVED_GIB <= gpu.memory_gib


def estimate(config: Config, processes: int, gpu: Gpu, sequence: AverageSequence) -> Estimate:
    """Args: sequence: `average_sequence(config)`. Raises ConfigError if the processes do not fit the layout or the
    batch.

    Returns: for a generator and a discriminator, which read the same sequences one after another, the sum of both.
    """
    models = [model for model in model_spec(config).made_of(config) if isinstance(model, ModelConfig)]
    if len(models) == 1 or config.decoder is not None:
        return _estimate_model(config, processes, gpu, sequence)
    sequences = replace(sequence, loss_tokens=0.0), sequence  # the discriminator has no LM head
    estimates = [
        _estimate_model(_with_model(config, model), processes, gpu, model_sequence)
        for model, model_sequence in zip(models, sequences, strict=True)
    ]
    shared = model_spec(config).count(config) / sum(parameter_count(model) for model in models)
    return _add_estimates(estimates, shared)


def _with_model(config: Config, model: ModelConfig) -> Config:
    """The configuration with one model that predicts masked tokens."""
    training = replace(config.training, loss_normalization="global_tokens", loss_weights={})
    masked = {"masked_lm": 1}
    return replace(config, model=model, training=training, objectives=masked, objective_sections={})


def _add_estimates(estimates: list[Estimate], shared: float) -> Estimate:
    """Two models that run one after another.

    Args: shared: their parameters, with common embeddings counted once, over the sum of their parameters.
    """

    def total(name: str) -> float:
        return sum(getattr(one, name) for one in estimates)

    def sums(name: str) -> dict[str, float]:
        names = dict.fromkeys(key for one in estimates for key in getattr(one, name))
        return {key: sum(getattr(one, name).get(key, 0.0) for one in estimates) for key in names}

    peaks = [vars(one.peak) for one in estimates]
    together = {key: sum(peak[key] for peak in peaks) for key in peaks[0]}
    together["rest"] = max(peak["rest"] for peak in peaks)
    for key in ("weights", "gradients", "optimizer"):
        together[key] *= shared
    first, second = estimates
    return replace(
        first,
        peak=PeakMemory(**together),
        launches=total("launches"),
        kernel_ms=sums("kernel_ms"),
        collectives=sums("collectives"),
        collective_mb={**second.collective_mb, **first.collective_mb},
        communication_ms=sums("communication_ms"),
        host_ms=total("host_ms"),
        roofline_ms=total("roofline_ms"),
        rank_parameters=round(total("rank_parameters") * shared),
        flops=total("flops"),
    )


def _estimate_model(config: Config, processes: int, gpu: Gpu, sequence: AverageSequence) -> Estimate:
    sizes = Sizes(config, processes, sequence, gpu.processors)
    config.phase_plan.require_ranks(sizes.dp)
    all_stages = stages(sizes)
    # The first stage, the inner one with most blocks, and the last: no other stage needs more than these.
    inner = range(1, len(all_stages) - 1)
    largest_inner = [max(inner, key=lambda i: (all_stages[i].blocks, -i))] if inner else []
    counted = sorted({0, *largest_inner, len(all_stages) - 1})
    tallies = [stage_tally(all_stages[i], sizes, gpu) for i in counted]
    bubble = 1 + (sizes.pp - 1) / sizes.micro_batches
    slowest = max(tallies, key=_micros)
    micro_batches, batch = sizes.micro_batches, config.batch
    samples = batch.micro_batch_size * micro_batches
    rows = samples * sequence.length / 512
    counts = (
        sequence.tokens,
        sequence.loss_tokens,
        sequence.visible_keys,
        sequence.decoder_tokens,
        sequence.decoder_keys,
    )
    flops = step_flops(config.model, *(int(count * samples) for count in counts)) * sizes.dp / processes
    return Estimate(
        peak=max((peak_memory(all_stages[i], i, sizes) for i in counted), key=lambda peak: peak.total),
        launches=max(_launches(tally) for tally in tallies),
        kernel_ms={name: micros / 1e3 for name, micros in slowest.micros.items()},
        collectives=_largest(tallies, "collectives", 1.0),
        collective_mb=_largest(tallies, "bytes", 1e6),
        communication_ms=_largest(tallies, "ring_micros", 1e3),
        host_ms=max(HOST.millis(_launches(tally), rows, tally.public_calls) for tally in tallies) * bubble,
        roofline_ms=_micros(slowest) / 1e3 * bubble,
        bubble=bubble,
        rank_parameters=max(stage.numbers for stage in all_stages),
        tokens=sequence.tokens * samples * sizes.dp,
        lengths=", ".join(f"{length:,.0f}" for length in sorted(sizes.lengths[0])),
        flops=flops,
    )


def _micros(tally: Tally) -> float:
    return sum(tally.micros.values())


def _launches(tally: Tally) -> float:
    return tally.launches + sum(tally.collectives.values())


def _largest(tallies: list[Tally], name: str, unit: float) -> dict[str, float]:
    """For each group of ranks the largest figure among the stages."""
    groups = sorted({group for tally in tallies for group in getattr(tally, name)})
    return {group: max(getattr(tally, name)[group] for tally in tallies) / unit for group in groups}
