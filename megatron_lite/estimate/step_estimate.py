"""Memory and time of a training step on GPUs, from counts and one assumption: the share of the peak that is reached.

Nothing runs: the sizes of the configuration's batches and the shapes of its parameters are counted. Tests compare
memory and bytes with traces of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.rules import alone
from megatron_lite.config.tree import Config
from megatron_lite.estimate.average_sequence import AverageSequence
from megatron_lite.estimate.communication import traffic
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.memory import PeakMemory, peak_memory
from megatron_lite.estimate.parameters import stages
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import parameter_count, step_flops

RESERVED_GIB = 3.0  # for CUDA, NCCL and fragmentation, which are not counted: an allowance, not measured
# Of the peak, without communication. Published runs of 0.8 to 8 billion parameters on H100s reach 0.33 to 0.46.
EFFICIENCY = 0.4


def require_no_decoder_config(config: Config) -> None:
    """Raise ConfigError for an encoder and a decoder that read separate texts (OPTIMUS)."""
    if config.decoder is not None:
        nothing = "decoder=null decoder_tokenizer=null"
        raise ConfigError(
            f"decoder is set, but an estimate covers a single Transformer; estimate the encoder with {nothing} "
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
    return config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)


@dataclass(frozen=True)
class Estimate:
    """A training step; in a pipeline, of the rank with the largest figure. Times are milliseconds per step."""

    peak: PeakMemory
    compute_ms: float
    communication_mb: dict[str, float]  # group -> MB of the largest tensor of each collective, summed
    communication_ms: dict[str, float]  # group -> ms
    overlap_ms: float  # of the computation during which gradients and weights are exchanged
    bubble: float  # factor in the time of a micro-batch: a pipeline's fill and drain
    rank_parameters: int  # of the fullest rank
    tokens: float  # of all ranks, without padding
    flops: float  # of the model on one rank, without recomputation

    @property
    def peak_gib(self) -> float:
        return self.peak.total / 2**30

    @property
    def waiting_ms(self) -> float:
        """Communication for which a step waits: the exchange of gradients and weights as far as it is longer than the
        computation at the same time, and all that is within a micro-batch."""
        within = sum(self.communication_ms.get(group, 0.0) for group in ("tp", "pp"))
        exchange = sum(self.communication_ms.values()) - within
        return self.bubble * within + max(0.0, exchange - self.overlap_ms)

    @property
    def step_ms(self) -> float:
        return self.bubble * self.compute_ms + self.waiting_ms

    def mfu(self, gpu: Gpu) -> float:
        """Share of the peak that the model's FLOPs reach."""
        return self.flops / self.step_ms / gpu.peak_tflops / 1e9

    def fits(self, gpu: Gpu) -> bool:
        return self.peak_gib + RESERVED_GIB <= gpu.memory_gib


def estimate(
    config: Config, processes: int, gpu: Gpu, sequence: AverageSequence, efficiency: float = EFFICIENCY
) -> Estimate:
    """Args: sequence: `average_sequence(config)`. efficiency: share of the peak that computation reaches.

    Raises ConfigError if the processes do not fit the layout or the batch.

    Returns: for a generator and a discriminator, which read the same sequences one after another, the sum of both.
    """
    models = [model for model in model_spec(config).made_of(config) if isinstance(model, ModelConfig)]
    if len(models) == 1 or config.decoder is not None:
        return _estimate_model(config, processes, gpu, sequence, efficiency)
    sequences = replace(sequence, loss_tokens=0.0), sequence  # the discriminator has no LM head
    first, second = (
        _estimate_model(_with_model(config, model), processes, gpu, model_sequence, efficiency)
        for model, model_sequence in zip(models, sequences, strict=True)
    )
    shared = model_spec(config).count(config) / sum(parameter_count(model) for model in models)
    return _both(first, second, shared)


def _with_model(config: Config, model: ModelConfig) -> Config:
    """The configuration with one model that predicts masked tokens."""
    training = replace(config.training, loss_normalization="global_tokens", loss_weights={})
    masked = {"masked_lm": 1}
    return replace(config, model=model, training=training, objectives=masked, objective_sections={})


def _both(first: Estimate, second: Estimate, shared: float) -> Estimate:
    """Two models that run one after another.

    Args: shared: their parameters, with common embeddings counted once, over the sum of their parameters.
    """
    one, other = vars(first.peak), vars(second.peak)
    peak = {key: one[key] + other[key] for key in one}
    peak["rest"] = max(one["rest"], other["rest"])
    for key in ("weights", "gradients", "optimizer"):
        peak[key] *= shared

    def sums(name: str) -> dict[str, float]:
        ours, theirs = getattr(first, name), getattr(second, name)
        return {key: ours.get(key, 0.0) + theirs.get(key, 0.0) for key in {**ours, **theirs}}

    return replace(
        first,
        peak=PeakMemory(**peak),
        compute_ms=first.compute_ms + second.compute_ms,
        communication_mb=sums("communication_mb"),
        communication_ms=sums("communication_ms"),
        overlap_ms=first.overlap_ms + second.overlap_ms,
        rank_parameters=round((first.rank_parameters + second.rank_parameters) * shared),
        flops=first.flops + second.flops,
    )


def _estimate_model(
    config: Config, processes: int, gpu: Gpu, sequence: AverageSequence, efficiency: float
) -> Estimate:
    sizes = Sizes(config, processes, sequence, gpu.processors)
    config.phase_plan.require_ranks(sizes.dp)
    all_stages = stages(config)
    # The first stage, the inner one with most blocks, and the last: no other stage needs more than these.
    inner = range(1, len(all_stages) - 1)
    largest_inner = [max(inner, key=lambda i: (all_stages[i].blocks, -i))] if inner else []
    counted = sorted({0, *largest_inner, len(all_stages) - 1})
    exchanged = [traffic(all_stages[i], sizes, gpu) for i in counted]
    samples = config.batch.micro_batch_size * sizes.micro_batches
    tokens, *others = (
        int(count * samples)
        for count in (
            sequence.tokens,
            sequence.loss_tokens,
            sequence.visible_keys,
            sequence.decoder_tokens,
            sequence.decoder_keys,
        )
    )
    share = sizes.dp / processes
    flops = step_flops(config.model, tokens, *others) * share
    # Recomputation is another forward pass, a third of the whole, of blocks or of attention alone.
    again = {
        "none": 0.0,
        "selective": flops - step_flops(config.model, tokens, others[0], 0.0, others[2], 0) * share,
        "full": flops,
    }
    computed = flops + again[config.training.recompute] / 3

    def largest(name: str, unit: float) -> dict[str, float]:
        """For each group of ranks the largest figure among the stages."""
        groups = sorted({group for one in exchanged for group in getattr(one, name)})
        return {group: max(getattr(one, name)[group] for one in exchanged) / unit for group in groups}

    compute_ms = computed / (gpu.peak_tflops * efficiency) / 1e9
    return Estimate(
        peak=max((peak_memory(all_stages[i], i, sizes) for i in counted), key=lambda peak: peak.total),
        compute_ms=compute_ms,
        communication_mb=largest("bytes", 1e6),
        communication_ms=largest("milliseconds", 1.0),
        # ZeRO 1 exchanges gradients in the last micro-batch, the others in each.
        overlap_ms=compute_ms / (sizes.micro_batches if config.parallel.zero_stage == 1 else 1),
        bubble=1 + (sizes.pp - 1) / sizes.micro_batches,
        rank_parameters=max(stage.numbers for stage in all_stages),
        tokens=sequence.tokens * samples * sizes.dp,
        flops=flops,
    )
