"""Sections of the configuration: the help, default and range of each setting, and checks within a section.

tree.py puts them together, and checks what concerns several sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import REQUIRED, check, checked, setting, setting_mapping
from data_utils.objectives import LOSS_NAMES

OPTIMIZERS = ("adamw", "lamb", "stable_adamw", "adafactor", "muon")
LOSS_NORMALIZATIONS = ("global_tokens", "per_objective", "mean_of_means")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("batch.ramp")
class RampConfig:
    start: int = setting(REQUIRED, "samples of the first batches", at_least=1)
    by: int = setting(REQUIRED, "samples by which batches grow", at_least=1)
    samples: int = setting(REQUIRED, "samples of the whole ramp, as Megatron's rampup-batch-size", at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("batch")
class BatchConfig:
    micro_batch_size: int = setting(8, "samples per data-parallel rank and forward pass", at_least=1)
    global_batch_size: int = setting(16, "samples per optimizer step, all ranks together", at_least=1)
    ramp: RampConfig | None = setting(
        None, "smaller batches at the beginning (of the phase), which grow to global_batch_size; null = none"
    )

    def __post_init__(self) -> None:
        check(
            self.global_batch_size % self.micro_batch_size == 0,
            f"batch.global_batch_size ({self.global_batch_size}) must be a multiple of "
            f"batch.micro_batch_size ({self.micro_batch_size}); change one of them.",
        )
        ramp, size, micro = self.ramp, self.global_batch_size, self.micro_batch_size
        check(
            ramp is None
            or (
                ramp.start < size
                and (size - ramp.start) % ramp.by == ramp.start % micro == ramp.by % micro == 0
            ),
            f"batch.ramp has start {ramp and ramp.start} and by {ramp and ramp.by}; both must be multiples of "
            f"batch.micro_batch_size ({micro}), and by must divide the way from start up to batch.global_batch_size "
            f"({size}).",
        )

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Micro-batches per optimizer step and rank. Raises: ConfigError when the world does not fit the batch."""
        per_pass = self.micro_batch_size * data_parallel_size
        if self.global_batch_size % per_pass:
            raise ConfigError(
                f"batch.global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"batch.micro_batch_size ({self.micro_batch_size}) x data-parallel ranks "
                f"({data_parallel_size}) = {per_pass}; start a number of processes that divides "
                f"{self.global_batch_size // self.micro_batch_size}, or change one of the sizes."
            )
        return self.global_batch_size // per_pass


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("parallel")
class ParallelConfig:
    tensor_parallel_size: int = setting(
        1, "ranks that share every layer; must divide the attention heads", at_least=1
    )
    sequence_parallel: bool = setting(
        False, "split norms, dropout and residuals along the tokens over the tensor-parallel ranks"
    )
    pipeline_parallel_size: int = setting(
        1, "stages that share the sequence of blocks; needs zero_stage 1", at_least=1
    )
    # Stage 0 is refused: with fp16 DeepSpeed then unscales gradients of a loss that was never scaled.
    zero_stage: int = setting(
        1,
        "DeepSpeed ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights",
        one_of=(1, 2, 3),
    )
    offload_optimizer: bool = setting(
        False, "keep fp32 weights and Adam moments in CPU memory and step there; not with pipeline stages"
    )

    def __post_init__(self) -> None:
        check(
            self.pipeline_parallel_size == 1 or self.zero_stage == 1,
            f"parallel.zero_stage is {self.zero_stage} with pipeline_parallel_size "
            f"{self.pipeline_parallel_size}; DeepSpeed's pipeline shards the optimizer only: set zero_stage to 1.",
        )
        check(
            self.pipeline_parallel_size == 1 or not self.offload_optimizer,
            f"parallel.offload_optimizer is true with pipeline_parallel_size {self.pipeline_parallel_size}, where "
            "DeepSpeed lets the tied embedding of the first and last stage drift apart; set one of them to its "
            "default.",
        )
        check(
            not self.sequence_parallel or self.tensor_parallel_size > 1,
            "parallel.sequence_parallel is true with tensor_parallel_size 1; it splits tokens over the "
            "tensor-parallel ranks: raise tensor_parallel_size, or set it to false.",
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that share the samples. Raises ConfigError when the processes do not divide."""
        per_replica = self.tensor_parallel_size * self.pipeline_parallel_size
        if world_size % per_replica:
            raise ConfigError(
                f"the run has {world_size} processes, but parallel.tensor_parallel_size "
                f"({self.tensor_parallel_size}) x pipeline_parallel_size ({self.pipeline_parallel_size}) = "
                f"{per_replica} must divide their number; start a multiple of {per_replica}."
            )
        return world_size // per_replica


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("training")
class TrainingConfig:
    steps: int = setting(REQUIRED, "optimizer steps of the whole run", at_least=1)
    seed: int = setting(1234, "seed of initial weights, samples and dropout", at_least=0, below=2**63)
    precision: str = setting(
        "bf16",
        "bf16, fp16 (dynamic loss scaling) or fp32; accumulation is always fp32",
        one_of=("bf16", "fp16", "fp32"),
    )
    recompute: str = setting(
        "none",
        "what the backward pass recomputes: none, selective (attention) or full (whole blocks)",
        one_of=("none", "selective", "full"),
    )
    deterministic: bool = setting(
        False,
        "one order for every sum, so that runs on equal GPUs repeat each other bit for bit (CPUs do anyway); slower",
    )
    tf32: bool = setting(
        False,
        "on GPUs, multiply fp32 numbers as TF32, which keeps 10 bits of them: faster, but not what a CPU computes",
    )
    kernels: str = setting(
        "fused",
        "on GPUs, what computes norms, activations, dropout and cross entropy: fused (kernels of this project) or torch"
        " (torch's operators: slower, to find out whether a kernel is at fault)",
        one_of=("fused", "torch"),
    )
    cuda_graphs: bool = setting(
        False,
        "on GPUs, launch each block as one CUDA graph in each direction, by the third batch of a shape: less work for "
        "the host, more memory",
    )
    layernorm: str = setting(
        "torch",
        "whose LayerNorm kernel: torch's or that of NVIDIA apex, which must be installed",
        one_of=("torch", "apex"),
    )
    loss_normalization: str = setting(
        "global_tokens",
        "global_tokens: sum over loss tokens / their number in the whole step; mean_of_means: the "
        "reference's mean per micro-batch, then over micro-batches and ranks; per_objective: the sum over the "
        "losses (masked, next_sentence, ...) of each one's mean over its own tokens in the whole step",
        one_of=LOSS_NORMALIZATIONS,
    )
    loss_weights: dict[str, Any] = setting_mapping(
        "per_objective only: loss -> factor of its mean, 1 if not named; names as in the log line, loss/NAME"
    )
    label_smoothing: float = setting(
        0.0,
        "part of a predicted token's probability that is spread over the whole vocabulary",
        at_least=0,
        below=1,
    )
    z_loss: float = setting(
        0.0,
        "factor of the squared log-sum-exp of a predicted token's logits in the loss of training (T5: 0.0001)",
        at_least=0,
    )
    loss_rows: int = setting(
        0, "rows of logits in memory at a time, which are computed twice for that; 0 = all, once", at_least=0
    )
    max_nonfinite_steps: int = setting(
        20,
        "consecutive steps, skipped for non-finite gradients, that stop the run; fp16 may skip 17 to find its scale",
        at_least=1,
    )
    replica_check_interval: int = setting(
        0,
        "steps between checks that weights held by several ranks are equal bit for bit; 0 = never",
        at_least=0,
    )
    gradient_norm_interval: int = setting(
        0, "steps between records of every layer's gradient norm, before clipping; 0 = never", at_least=0
    )
    eval_interval: int = setting(
        1000, "steps between evaluations on the validation split; 0 = only at the end", at_least=0
    )
    eval_samples: int = setting(
        256, "validation samples per evaluation, the same ones every time", at_least=1
    )
    eval_fillings: int = setting(
        0,
        "validation texts whose short blanks the model fills at each evaluation, for metrics.jsonl and report.py",
        at_least=0,
        at_most=20,
    )
    stop_after_step: int | None = setting(
        None,
        "save and stop cleanly after this step (a planned interruption); null = run to the end",
        at_least=1,
    )

    def __post_init__(self) -> None:
        check(
            not self.loss_weights or self.loss_normalization == "per_objective",
            f"training.loss_weights is set but training.loss_normalization is {self.loss_normalization}; set "
            "that to per_objective, or remove the weights.",
        )
        for name, weight in self.loss_weights.items():
            check(
                name in LOSS_NAMES,
                f"a name in training.loss_weights is {shown(name)}; it must be one of {', '.join(LOSS_NAMES)}.",
            )
            number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            check(
                number and 0 <= weight < float("inf"),
                f"training.loss_weights.{name} is {shown(weight)}; it must be a number, 0 or more.",
            )
        check(
            self.stop_after_step is None or self.stop_after_step <= self.steps,
            f"training.stop_after_step is {self.stop_after_step}; it must be at most "
            f"training.steps ({self.steps}).",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("optimizer")
class OptimizerConfig:
    kind: str = setting(
        "adamw",
        "adamw; lamb (ALBERT), stable_adamw (ModernBERT), adafactor (T5), or muon for the matrices of blocks and AdamW "
        "for the rest: those at parallel.zero_stage 1 or 2",
        one_of=OPTIMIZERS,
    )
    kernel: str = setting(
        "torch",
        "whose AdamW kernel: torch's or that of NVIDIA apex (FusedAdam), which must be installed",
        one_of=("torch", "apex"),
    )
    lr: float = setting(1e-4, "peak learning rate; adafactor's is relative to the weights", above=0)
    beta1: float = setting(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = setting(0.98, "decay of the second moment", at_least=0, below=1)
    eps: float = setting(1e-6, "Adam epsilon", above=0)
    weight_decay: float = setting(0.1, "decoupled weight decay; none on LayerNorm and biases", at_least=0)
    bias_correction: bool = setting(
        False, "lamb: correct the moments of the first steps, which ALBERT does not"
    )
    momentum: float = setting(0.95, "muon: decay of its momentum", at_least=0, below=1)
    clip_grad_norm: float = setting(
        1.0, "global gradient norm above which gradients are scaled down; 0 = off", at_least=0
    )

    def __post_init__(self) -> None:
        check(
            self.kind == "adamw" or self.kernel == "torch",
            f"optimizer.kernel is {self.kernel}, which has no {self.kind}; set it to torch, or optimizer.kind to "
            "adamw.",
        )
        readers = {
            "bias_correction": ("lamb",),
            "momentum": ("muon",),
            **dict.fromkeys(("beta1", "beta2", "eps"), tuple(set(OPTIMIZERS) - {"adafactor"})),
        }
        for name, kinds in readers.items():
            value = getattr(self, name)
            check(
                self.kind in kinds or value == type(self).__dataclass_fields__[name].default,
                f"optimizer.{name} is {shown(value)} with optimizer.kind {self.kind}, which does not read it; leave it "
                "out.",
            )

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError unless the optimizer runs in this layout."""
        check(
            self.kind == "adamw" or parallel.zero_stage < 3,
            f"optimizer.kind is {self.kind} with parallel.zero_stage 3, where DeepSpeed's own optimizer runs AdamW "
            "only; set zero_stage to 1 or 2.",
        )
        check(
            self.kind == "adamw" or not parallel.offload_optimizer,
            f"optimizer.kind is {self.kind} with parallel.offload_optimizer, which serves AdamW only; set that "
            "to false.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("checkpoint")
class CheckpointConfig:
    save_interval: int = setting(1000, "steps between checkpoints; 0 = only when the run stops", at_least=0)
    keep_last: int = setting(3, "newest checkpoints kept; 0 = all", at_least=0)
    keep_every: int = setting(
        0, "checkpoints at multiples of this many steps are kept for good; 0 = none", at_least=0
    )
    asynchronous: bool = setting(
        False,
        "write in the background, from a copy of the state in CPU memory (12 bytes per parameter owned)",
    )
    max_failed_saves: int = setting(
        3,
        "consecutive failed saves, for example on a full disk, that stop the run; below that it only warns",
        at_least=1,
    )
    resume: str = setting(
        "auto",
        "auto: continue from the newest valid checkpoint of the run directory; never: refuse to start if it "
        "has one",
        one_of=("auto", "never"),
    )
    accept_changed_data: bool = setting(
        False,
        "continue although data.train, past phases or training.seed differ from the checkpoint, by which samples "
        "come again or are left out (an event says what); false = refuse",
    )
    initialize_from: str | None = setting(
        None,
        "run directory or step_... directory to begin with where the run directory has no checkpoint yet; "
        "null = initial weights",
        is_path=True,
    )
    initialize: str = setting(
        "weights",
        "what of it: weights (fresh optimizer, step 0) or all (optimizer, step and samples too: a branch)",
        one_of=("weights", "all"),
    )

    def __post_init__(self) -> None:
        check(
            self.save_interval == 0 or self.keep_every % self.save_interval == 0,
            f"checkpoint.keep_every ({self.keep_every}) must be a multiple of checkpoint.save_interval "
            f"({self.save_interval}), or no checkpoint exists at most of its steps; change one of them.",
        )
        check(
            self.initialize == "weights" or self.initialize_from is not None,
            "checkpoint.initialize is all, but checkpoint.initialize_from is null; name a checkpoint there.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("run")
class RunConfig:
    directory: str = setting(
        "runs/glm",
        "where checkpoints, metrics.jsonl, TensorBoard files and the resolved config go",
        is_path=True,
    )
    log_interval: int = setting(10, "steps between log lines", at_least=1)
    progress_bar: bool = setting(False, "show a progress bar below them where stderr is a terminal")
    tensorboard: bool = setting(True, "write TensorBoard event files below directory/tensorboard")
    peak_tflops: float | None = setting(
        None,
        "peak TFLOP/s of one device for MFU; null = the data sheet's of a known GPU; for other devices log lines give "
        "the share of the rate that this machine's products of matrices reach",
        above=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("timeouts")
class TimeoutsConfig:
    setup_seconds: int = setting(
        1800, "longest time from the start of a process to the first step", at_least=1
    )
    step_seconds: int = setting(
        1800, "longest time of one optimizer step, or of a check between steps", at_least=1
    )
    evaluation_seconds: int = setting(3600, "longest time of an evaluation", at_least=1)
    checkpoint_seconds: int = setting(3600, "longest time of loading or saving a checkpoint", at_least=1)
    heartbeat_seconds: int = setting(
        10, "time between the notes of where each rank is, in directory/heartbeats", at_least=1
    )

    @property
    def sections(self) -> dict[str, float]:
        """Limit in seconds by section (watchdog.py)."""
        return {
            "setup": self.setup_seconds,
            "step": self.step_seconds,
            "evaluation": self.evaluation_seconds,
            "checkpoint": self.checkpoint_seconds,
        }

    @property
    def collective_seconds(self) -> float:
        """Longest wait in one collective: longer than all limits, because the watchdog reports more than torch does."""
        return max(self.sections.values()) + 60.0
