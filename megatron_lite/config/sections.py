"""Sections of the configuration: the help, default and range of each setting, and checks within a section.

tree.py puts them together, and checks what concerns several sections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import REQUIRED, check, checked, setting, setting_mapping
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.attention import CHOICES

OPTIMIZERS = ("adamw", "lamb", "stable_adamw", "adafactor", "muon")
LOSS_NORMALIZATIONS = ("global_tokens", "per_objective", "mean_of_means")
# Names of URL parameters that hold a credential.
_SECRET = re.compile(r"token|key|secret|pass|pwd|auth|credential|sig(nature)?$|session", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("batch.ramp")
class RampConfig:
    on_resume: ClassVar[str] = "phase"

    start: int = setting(REQUIRED, "Initial batch size, in samples.", at_least=1)
    by: int = setting(REQUIRED, "Batch size increment, in samples.", at_least=1)
    samples: int = setting(
        REQUIRED, "Samples over which the batch size grows, as in Megatron's --rampup-batch-size.", at_least=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("batch")
class BatchConfig:
    on_resume: ClassVar[str] = "phase"

    micro_batch_size: int = setting(
        8, "Samples per forward pass and data-parallel rank.", at_least=1, on_resume="free"
    )
    global_batch_size: int = setting(16, "Samples per optimizer step over all ranks.", at_least=1)
    ramp: RampConfig | None = setting(
        None, "Batch size ramp-up to global_batch_size at the start of the run or phase; null = none."
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
            f"batch.micro_batch_size ({micro}), and by must divide batch.global_batch_size ({size}) - start.",
        )

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Micro-batches per optimizer step and rank. Raises: ConfigError when the world does not fit the batch."""
        per_pass = self.micro_batch_size * data_parallel_size
        if self.global_batch_size % per_pass:
            raise ConfigError(
                f"batch.global_batch_size ({self.global_batch_size}) must be a multiple of batch.micro_batch_size "
                f"({self.micro_batch_size}) x data-parallel ranks ({data_parallel_size}) = {per_pass}; use a "
                f"number of processes that divides {self.global_batch_size // self.micro_batch_size}, or change "
                "one of the sizes."
            )
        return self.global_batch_size // per_pass


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("parallel")
class ParallelConfig:
    on_resume: ClassVar[str] = "free"

    tensor_parallel_size: int = setting(
        1, "Tensor-parallel ranks; must divide the number of attention heads.", at_least=1
    )
    sequence_parallel: bool = setting(
        False, "Shard norms, dropout and residuals along the sequence over the tensor-parallel ranks."
    )
    pipeline_parallel_size: int = setting(1, "Pipeline stages; needs zero_stage 1.", at_least=1)
    expert_parallel_size: int = setting(
        1,
        "Data-parallel ranks that split the experts of model.experts; must divide their number and that of the "
        "data-parallel ranks.",
        at_least=1,
    )
    # Stage 0 is refused: with fp16 DeepSpeed then unscales gradients of a loss that was never scaled.
    zero_stage: int = setting(
        1,
        "ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights.",
        one_of=(1, 2, 3),
    )
    offload_optimizer: bool = setting(
        False,
        "Keep fp32 master weights and Adam moments in CPU memory and run the optimizer there; not with "
        "pipeline stages.",
    )

    def __post_init__(self) -> None:
        check(
            self.pipeline_parallel_size == 1 or self.zero_stage == 1,
            f"parallel.zero_stage is {self.zero_stage} with pipeline_parallel_size "
            f"{self.pipeline_parallel_size}, but pipeline stages support ZeRO 1 only; set zero_stage to 1.",
        )
        check(
            self.pipeline_parallel_size == 1 or not self.offload_optimizer,
            f"parallel.offload_optimizer is true with pipeline_parallel_size {self.pipeline_parallel_size}, "
            "where DeepSpeed lets the tied embeddings of the first and last stage diverge; set "
            "offload_optimizer to false, or pipeline_parallel_size to 1.",
        )
        check(
            not self.sequence_parallel or self.tensor_parallel_size > 1,
            "parallel.sequence_parallel is true with tensor_parallel_size 1; raise tensor_parallel_size, or "
            "set sequence_parallel to false.",
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that share the samples. Raises ConfigError when the processes do not divide."""
        per_replica = self.tensor_parallel_size * self.pipeline_parallel_size
        if world_size % per_replica:
            raise ConfigError(
                f"the run has {world_size} processes, which must be a multiple of parallel.tensor_parallel_size "
                f"({self.tensor_parallel_size}) x pipeline_parallel_size ({self.pipeline_parallel_size}) = "
                f"{per_replica}; change one of them."
            )
        ranks = world_size // per_replica
        if ranks % self.expert_parallel_size:
            raise ConfigError(
                f"parallel.expert_parallel_size is {self.expert_parallel_size}, but it must divide the {ranks} "
                "data-parallel ranks; change it, or the number of processes."
            )
        return ranks


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("training")
class TrainingConfig:
    steps: int = setting(REQUIRED, "Optimizer steps of the whole run.", at_least=1, on_resume="free")
    seed: int = setting(1234, "Seed of initial weights, sample order and dropout.", at_least=0, below=2**63)
    precision: str = setting(
        "bf16",
        "bf16, fp16 (dynamic loss scaling) or fp32; accumulation is always in fp32.",
        one_of=("bf16", "fp16", "fp32"),
    )
    recompute: str = setting(
        "none",
        "Activation recomputation in backward: none, selective (attention only) or full (whole blocks).",
        one_of=("none", "selective", "full"),
        on_resume="free",
    )
    deterministic: bool = setting(
        False,
        "Fixed summation order, so that runs on the same GPU model are bit-identical (CPU runs always are);"
        " slower.",
        on_resume="free",
    )
    tf32: bool = setting(
        False,
        "Compute fp32 matrix products in TF32 (10-bit mantissa) on GPUs: faster, but results differ from a "
        "CPU's.",
        on_resume="free",
    )
    kernels: str = setting(
        "fused",
        "GPU implementation of norms, activations, dropout and cross entropy: fused (Triton kernels) or "
        "torch (PyTorch operators; slower, for debugging a kernel).",
        one_of=("fused", "torch"),
        on_resume="free",
    )
    attention: str = setting(
        "auto",
        "GPU implementation of attention: fa2 (FlashAttention 2, in torch), fa3 (Hopper, package flash_attn_3), fa4 "
        "(Hopper and Blackwell, package flash-attn-4), torch (the memory-efficient kernel: fp32, old GPUs), or auto: "
        "without attention dropout fa3 on Hopper and fa4 on Blackwell, if installed, else fa2, else torch.",
        one_of=CHOICES,
        on_resume="free",
    )
    cuda_graphs: bool = setting(
        False,
        "Capture each block as a CUDA graph per direction, at the latest on the third batch of a shape: "
        "less host overhead, more memory.",
        on_resume="free",
    )
    layernorm: str = setting(
        "torch",
        "LayerNorm implementation: torch or NVIDIA apex (must be installed).",
        one_of=("torch", "apex"),
        on_resume="free",
    )
    loss_normalization: str = setting(
        "global_tokens",
        "global_tokens = sum of the token losses / number of loss tokens in the whole step; mean_of_means ="
        " mean per micro-batch, then over micro-batches and ranks (as the GLM reference code); "
        "per_objective = sum over the losses (masked, next_sentence, ...) of the mean of each over its own "
        "tokens in the whole step.",
        one_of=LOSS_NORMALIZATIONS,
    )
    loss_weights: dict[str, Any] = setting_mapping(
        "per_objective: loss name -> weight; 1 if not listed. Names as in the log line, loss/NAME.",
        on_resume="phase",
    )
    mtp_weight: float = setting(
        0.3,
        "Weight of the loss of model.mtp_layers: its mean over the tokens that it predicts in the step, times this, is "
        "added to the loss (GLM-4.5: 0.3, later 0.1).",
        at_least=0,
        on_resume="phase",
    )
    label_smoothing: float = setting(
        0.0,
        "Probability mass spread uniformly over the vocabulary.",
        at_least=0,
        below=1,
    )
    z_loss: float = setting(
        0.0,
        "Coefficient of z-loss, the squared log-sum-exp of the token logits, in training (T5: 0.0001); 0 = "
        "off.",
        at_least=0,
    )
    loss_rows: int = setting(
        0,
        "Compute logits in chunks of N tokens to save memory (recomputed in backward); 0 = all at once.",
        at_least=0,
        on_resume="free",
    )
    max_nonfinite_steps: int = setting(
        20,
        "Stop after this many consecutive steps skipped for non-finite gradients; fp16 may skip up to 17 to"
        " find its loss scale.",
        at_least=1,
        on_resume="free",
    )
    replica_check_interval: int = setting(
        0,
        "Steps between bitwise comparisons of weights that several ranks hold; 0 = never.",
        at_least=0,
        on_resume="free",
    )
    gradient_norm_interval: int = setting(
        0,
        "Steps between records of each layer's gradient norm, before clipping; 0 = never.",
        at_least=0,
        on_resume="free",
    )
    eval_interval: int = setting(
        1000,
        "Steps between evaluations on the validation corpora; 0 = only at the end.",
        at_least=0,
        on_resume="free",
    )
    eval_samples: int = setting(
        256, "Validation samples per evaluation; the same samples every time.", at_least=1, on_resume="free"
    )
    eval_fillings: int = setting(
        0,
        "Number of validation samples to infill at each evaluation, written to metrics.jsonl and shown by "
        "report.py.",
        at_least=0,
        at_most=20,
        on_resume="free",
    )
    stop_after_step: int | None = setting(
        None,
        "Save and stop after this step (a planned interruption); null = run to training.steps.",
        at_least=1,
        on_resume="free",
    )

    def __post_init__(self) -> None:
        check(
            not self.loss_weights or self.loss_normalization == "per_objective",
            f"training.loss_weights is set, but training.loss_normalization is {self.loss_normalization}; set "
            "that to per_objective, or remove loss_weights.",
        )
        for name, weight in self.loss_weights.items():
            check(
                name in LOSS_NAMES,
                f"training.loss_weights contains {shown(name)}; it must be one of {', '.join(LOSS_NAMES)}.",
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
        "adamw, lamb (ALBERT), stable_adamw (ModernBERT), adafactor (T5) or muon (block matrices; AdamW for"
        " the rest). All but adamw need parallel.zero_stage 1 or 2.",
        one_of=OPTIMIZERS,
    )
    kernel: str = setting(
        "torch",
        "AdamW implementation: torch or NVIDIA apex FusedAdam (must be installed).",
        one_of=("torch", "apex"),
        on_resume="free",
    )
    lr: float = setting(
        1e-4,
        "Peak learning rate; for adafactor relative to the scale of the weights.",
        above=0,
        on_resume="phase",
    )
    beta1: float = setting(0.9, "Adam beta1: decay of the first moment.", at_least=0, below=1)
    beta2: float = setting(0.98, "Adam beta2: decay of the second moment.", at_least=0, below=1)
    eps: float = setting(1e-6, "Adam epsilon.", above=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay; not applied to norms and biases.", at_least=0)
    bias_correction: bool = setting(False, "LAMB: bias correction of the moments; ALBERT uses none.")
    momentum: float = setting(0.95, "Muon: momentum.", at_least=0, below=1)
    clip_grad_norm: float = setting(1.0, "Clip the global gradient norm to this value; 0 = off.", at_least=0)

    def __post_init__(self) -> None:
        check(
            self.kind == "adamw" or self.kernel == "torch",
            f"optimizer.kernel is {self.kernel}, which does not implement {self.kind}; set it to torch, or "
            "optimizer.kind to adamw.",
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
                f"optimizer.{name} is {shown(value)}, but optimizer.kind {self.kind} does not use it; remove it.",
            )

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError unless the optimizer runs in this layout."""
        check(
            self.kind == "adamw" or parallel.zero_stage < 3,
            f"optimizer.kind is {self.kind} with parallel.zero_stage 3, which supports adamw only; set "
            "zero_stage to 1 or 2.",
        )
        check(
            self.kind == "adamw" or not parallel.offload_optimizer,
            f"optimizer.kind is {self.kind} with parallel.offload_optimizer, which supports adamw only; set "
            "offload_optimizer to false.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("ema")
class EmaConfig:
    """Averages of the weights (megatron_lite/optim/ema.py)."""

    decay: float | None = setting(
        None,
        "Decay of an exponential moving average (EMA) of the weights, such as 0.999; lower during the first"
        " steps. Costs 4 bytes per parameter owned. null = no EMA.",
        above=0,
        below=1,
    )
    interval: int = setting(1, "Steps between EMA updates; each uses decay^interval.", at_least=1)
    use: bool = setting(
        False, "Evaluate with the EMA weights, and read them from the run's checkpoints.", on_resume="free"
    )

    def __post_init__(self) -> None:
        check(
            self.decay is not None or not self.use,
            "ema.use is true, but ema.decay is null; set ema.decay to a value such as 0.999, or ema.use to "
            "false.",
        )

    def check_run(self, parallel: ParallelConfig, has_task: bool) -> None:
        """Raise ConfigError unless averages can be kept in this layout, for what is trained."""
        check(
            self.decay is None or not has_task,
            f"ema.decay is {self.decay}, but fine-tuning keeps no EMA; set it to null.",
        )
        check(
            self.decay is None or parallel.zero_stage < 3,
            f"ema.decay is {self.decay} with parallel.zero_stage 3, where DeepSpeed owns the weights; set "
            "zero_stage to 1 or 2, or ema.decay to null.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("checkpoint")
class CheckpointConfig:
    on_resume: ClassVar[str] = "free"

    save_interval: int = setting(1000, "Steps between checkpoints; 0 = only when the run stops.", at_least=0)
    keep_last: int = setting(3, "Number of latest checkpoints to keep; 0 = all.", at_least=0)
    keep_every: int = setting(
        0, "Keep checkpoints at multiples of this many steps permanently; 0 = none.", at_least=0
    )
    asynchronous: bool = setting(
        False,
        "Write checkpoints in the background from a copy in CPU memory (12 bytes per parameter owned).",
    )
    max_failed_saves: int = setting(
        3,
        "Stop after this many consecutive failed saves, for example on a full disk; fewer only warn.",
        at_least=1,
    )
    resume: str = setting(
        "auto",
        "auto = continue from the latest valid checkpoint in the run directory; never = refuse to start if "
        "there is one.",
        one_of=("auto", "never"),
    )
    accept_changed_data: bool = setting(
        False,
        "Continue even if data.train, past phases or training.seed differ from the checkpoint; samples may "
        "then repeat or be missed, which the log states. false = refuse.",
    )
    initialize_from: str | None = setting(
        None,
        "Run or step_... directory to initialize from if the run directory has no checkpoint; null = random"
        " initialization.",
        is_path=True,
    )
    initialize: str = setting(
        "weights",
        "What to load from initialize_from: weights (new optimizer state, step 0) or all (also optimizer "
        "state, step and data position: a branch).",
        one_of=("weights", "all"),
    )
    upcycling_noise: float = setting(
        0.0,
        "Where experts begin as copies of a dense FFN: their own initial weights times this are "
        "added, so that they differ.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        check(
            self.save_interval == 0 or self.keep_every % self.save_interval == 0,
            f"checkpoint.keep_every ({self.keep_every}) must be a multiple of checkpoint.save_interval "
            f"({self.save_interval}); change one of them.",
        )
        check(
            self.initialize == "weights" or self.initialize_from is not None,
            "checkpoint.initialize is all, but checkpoint.initialize_from is null; set initialize_from to a "
            "checkpoint.",
        )
        check(
            not self.upcycling_noise or (self.initialize_from is not None and self.initialize == "weights"),
            f"checkpoint.upcycling_noise is {self.upcycling_noise}, but no weights of a dense checkpoint are loaded; "
            "set it to 0, or checkpoint.initialize_from to one and checkpoint.initialize to weights.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("run")
class RunConfig:
    on_resume: ClassVar[str] = "free"

    directory: str = setting(
        "runs/glm",
        "Directory of checkpoints, metrics.jsonl, TensorBoard files and the resolved configuration.",
        is_path=True,
    )
    log_interval: int = setting(10, "Steps between log lines.", at_least=1)
    progress_bar: bool = setting(False, "Show a progress bar if stderr is a terminal.")
    tensorboard: bool = setting(True, "Write TensorBoard event files to directory/tensorboard.")
    peak_tflops: float | None = setting(
        None,
        "Peak TFLOP/s of one device for MFU; null = data sheet value of a known GPU. On other devices the "
        "log relates throughput to the measured matrix-product rate instead.",
        above=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("timeouts")
class TimeoutsConfig:
    on_resume: ClassVar[str] = "free"

    setup_seconds: int = setting(
        1800, "Watchdog limit from process start to the first step, in seconds.", at_least=1
    )
    step_seconds: int = setting(
        1800, "Watchdog limit of an optimizer step or of a check between steps, in seconds.", at_least=1
    )
    evaluation_seconds: int = setting(3600, "Watchdog limit of an evaluation, in seconds.", at_least=1)
    checkpoint_seconds: int = setting(
        3600, "Watchdog limit of loading or saving a checkpoint, in seconds.", at_least=1
    )
    heartbeat_seconds: int = setting(
        10, "Seconds between heartbeats of each rank in directory/heartbeats.", at_least=1
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


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("trackers.wandb")
class WandbConfig:
    on_resume: ClassVar[str] = "free"

    project: str = setting(REQUIRED, "Weights & Biases project; needs the package wandb.")
    entity: str | None = setting(None, "User or team that owns the project; null = your default entity.")
    mode: str = setting(
        "online",
        "online = upload while training; offline = keep the run in directory/wandb and upload it with "
        "`wandb sync`.",
        one_of=("online", "offline"),
    )
    name: str | None = setting(None, "Run name in Weights & Biases; null = last component of run.directory.")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("trackers.mlflow")
class MlflowConfig:
    on_resume: ClassVar[str] = "free"

    uri: str = setting(
        REQUIRED,
        "Tracking server (https://...) or local store; needs the package mlflow-skinny.",
        is_path=True,
        or_url=True,
    )
    experiment: str = setting("megatron-lite-glm", "MLflow experiment; created if missing.")
    name: str | None = setting(None, "Run name in MLflow; null = last component of run.directory.")

    def __post_init__(self) -> None:
        check(
            "@" not in self.uri.partition("://")[2].partition("/")[0],
            "trackers.mlflow.uri contains a user name or password, which would be stored in every record of "
            "the configuration; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead.",
        )
        query = parse_qsl(self.uri.partition("?")[2].partition("#")[0], keep_blank_values=True)
        secret = next((name for name, _ in query if _SECRET.search(name)), None)
        check(
            secret is None,
            f"trackers.mlflow.uri contains {shown(secret)}, which would be stored in every record of the "
            "configuration; set MLFLOW_TRACKING_TOKEN instead.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersConfig:
    on_resume: ClassVar[str] = "free"

    wandb: WandbConfig | None = setting(None, "Weights & Biases; null = off.")
    mlflow: MlflowConfig | None = setting(None, "MLflow; null = off.")

    @property
    def is_used(self) -> bool:
        return self.wandb is not None or self.mlflow is not None


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("profiler")
class ProfilerConfig:
    on_resume: ClassVar[str] = "free"

    first_step: int | None = setting(
        None,
        "First step to trace with torch.profiler, written to directory/profile; null = off.",
        at_least=1,
    )
    last_step: int | None = setting(None, "Last step to trace; null = first_step.", at_least=1)
    ranks: tuple[int, ...] = setting((0,), "Ranks that write a trace.")
    memory: bool = setting(False, "Also write a GPU memory snapshot of these steps; refused on CPUs.")

    def __post_init__(self) -> None:
        first, last = self.first_step, self.last_step
        check(
            first is not None or (last is None and not self.memory),
            "profiler.last_step or profiler.memory is set, but profiler.first_step is null; set first_step "
            "too.",
        )
        check(
            first is None or last is None or first <= last,
            f"profiler.first_step is {first} and profiler.last_step {last}; first_step must not be larger "
            "than last_step.",
        )
        check(
            bool(self.ranks) and min(self.ranks) >= 0,
            f"profiler.ranks is {list(self.ranks)}; it must list ranks, 0 or more.",
        )

    def require_ranks(self, world_size: int) -> None:
        """Raise ConfigError if a rank to be traced does not exist."""
        check(
            self.first_step is None or max(self.ranks) < world_size,
            f"profiler.ranks is {list(self.ranks)}, but the run has {world_size} processes; ranks must be "
            "below that.",
        )

    @property
    def end(self) -> int | None:
        """The last step of the trace; None = there is none."""
        return self.first_step if self.last_step is None else self.last_step
