"""A user's DeepSpeed options -> settings of this project, and what remains for DeepSpeed.

`with_deepspeed` takes the section `deepspeed` of a tree of settings, with a DeepSpeed file on top of it, and replaces
it by the settings that its options mean. An option that is absent or "auto" leaves the tree's own setting. Where the
tree has none either, DeepSpeed's default holds for the parameters of the blocks `optimizer` and `scheduler`, if given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge, nest
from data_utils.common.untrusted import load_json
from megatron_lite.config.deepspeed_table import COMMENTS, SortedOptions, option_class, sort_options
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.sections import BatchConfig, OptimizerConfig, ParallelConfig, TrainingConfig

_DEFAULTS = {
    "batch": BatchConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig, "parallel": ParallelConfig,
    "training": TrainingConfig,
}  # fmt: skip


def with_deepspeed(
    tree: Mapping[str, Any],
    overrides: Mapping[str, Any],
    path: str | Path | None = None,
    processes: int = 1,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The tree of settings with what its DeepSpeed options mean; in `deepspeed` remains what DeepSpeed reads.

    Args:
        tree: files and overrides together.
        overrides: the command line's alone, which may not contradict the options.
        path: a DeepSpeed file, on top of the tree's own section.
        processes: of the run, which decide the batch where options give it for a process.
        say: called with a line on what the options changed, and one on what has no effect.
    Raises: ConfigError with all that must change.
    """
    given = tree.get("deepspeed") or {}
    if not isinstance(given, Mapping):
        return dict(tree)  # the settings refuse it
    if path is not None:
        # A DeepSpeed file stands between the YAML files and the command line.
        file_options = load_json(path, "DeepSpeed configuration", is_hjson=True)
        given = merge(merge(given, file_options), overrides.get("deepspeed") or {})
    source = str(path) if path is not None else ""
    options = sort_options(given)
    translation = _Translation(tree, overrides, options, processes)
    translation.run()
    options.refuse(source)
    stage = translation.value("parallel.zero_stage")
    result = merge(tree, {"deepspeed": None})
    for key, (value, _) in translation.settings.items():
        result = merge(result, nest(key, value))
    result["deepspeed"] = options.for_deepspeed(stage)
    for note in (translation.changes(), _without_effect(options.without_effect(stage))):
        if note and say is not None:
            say(f"{source or 'the section deepspeed'} {note}")
    return result


def _without_effect(reasons: Mapping[str, str]) -> str:
    """A note on options without effect; "" for none. Args: reasons: key -> reason."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        by_reason.setdefault(reason, []).append(key)
    groups = [f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    return f"has options without effect: {'; '.join(groups)}" if groups else ""


# Parameters of DeepSpeed's Adam that are read here, those that choose code which computes the same numbers, and those
# that would compute others, with the value that agrees with AdamW here.
_ADAM = {
    "lr": "number", "betas": "numbers", "eps": "number", "weight_decay": "number", "adam_w_mode": "flag",
    "max_grad_norm": "number",
}  # fmt: skip
_ADAM_KERNELS = dict.fromkeys(
    ("torch_adam", "fused", "foreach", "capturable", "differentiable", "set_grad_none"), "flag"
)
_ADAM_REFUSED = {
    "bias_correction": True, "amsgrad": False, "maximize": False, "fp32_optimizer_states": True,
    "eps_inside_sqrt": False,
}  # fmt: skip
_WARMUP = {"warmup_num_steps": "count", "warmup_type": "warmup", "last_batch_iteration": "none"}
_SCHEDULES = {  # DeepSpeed's class -> our kind, and its parameters
    "WarmupLR": ("deepspeed_constant", _WARMUP | {"warmup_min_lr": "number", "warmup_max_lr": "number"}),
    "WarmupDecayLR": (
        "deepspeed_linear",
        _WARMUP | {"warmup_min_lr": "number", "warmup_max_lr": "number", "total_num_steps": "size"},
    ),
    "WarmupCosineLR": (
        "deepspeed_cosine",
        _WARMUP | {"warmup_min_ratio": "share", "cos_min_ratio": "share", "total_num_steps": "size"},
    ),
}


class _Translation:
    """The settings that options mean. Adds problems and options without effect to the options."""

    def __init__(
        self,
        tree: Mapping[str, Any],
        overrides: Mapping[str, Any],
        options: SortedOptions,
        processes: int,
    ) -> None:
        self._tree, self._overrides, self._options, self._processes = tree, overrides, options, processes
        # Dotted setting -> value, and the DeepSpeed key that sets it.
        self.settings: dict[str, tuple[Any, str]] = {}

    def run(self) -> None:
        # Parallel sizes come before the batch, which depends on the number of data-parallel ranks.
        self._precision()
        self._parallel_sizes()
        self._batch()
        clip = self._options.settings.get("gradient_clipping")
        if clip is not None:
            self._set("optimizer.clip_grad_norm", clip, "gradient_clipping")
        if "optimizer" in self._options.settings:
            self._optimizer(self._options.settings["optimizer"])
        if "scheduler" in self._options.settings:
            self._scheduler(self._options.settings["scheduler"])
        for setting, (value, key) in self.settings.items():
            # The command line and the file both set it: neither is ignored without a message.
            typed = _lookup(self._overrides, setting)
            if typed is not None and not _equal(typed, value):
                self._options.problems.append(
                    f"{setting}={typed} contradicts deepspeed.{key}, which sets it to {value}; remove one of them."
                )

    def value(self, setting: str) -> Any:
        """A setting's value by the options, else by the tree, else its default."""
        if setting in self.settings:
            return self.settings[setting][0]
        given = self._explicit(setting)
        return _default(setting) if given is None else given

    def changes(self) -> str:
        """What the options change, in words; empty for nothing."""
        changes = []
        for setting, (value, key) in self.settings.items():
            given = self._explicit(setting)
            before = _default(setting) if given is None else given
            if not _equal(before, value):
                changes.append(f"{setting}={shown(value)} (was {shown(before)}; {key})")
        return f"sets {', '.join(changes)}" if changes else ""

    def _set(self, setting: str, value: Any, key: str) -> None:
        self.settings[setting] = value, key

    def _explicit(self, setting: str) -> Any:
        """The tree's value of a setting, None where it has none."""
        return _lookup(self._tree, setting)

    def _refuse(self, key: str, value: Any, remedy: str) -> None:
        self._options.problems.append(f"deepspeed.{key} is {shown(value)}: {remedy}.")

    def _precision(self) -> None:
        enabled = {name: self._options.settings.get(f"{name}.enabled") for name in ("fp16", "bf16")}
        if all(enabled.values()):
            self._refuse("fp16.enabled", True, "bf16.enabled is true too: keep one of them")
            return
        for name, on in enabled.items():
            if on:
                self._set("training.precision", name, f"{name}.enabled")
        now = self.value("training.precision")
        # The file switches off the half precision that the tree asks for, and on no other.
        if enabled.get(now) is False:
            self._set("training.precision", "fp32", f"{now}.enabled")

    def _parallel_sizes(self) -> None:
        settings = self._options.settings
        stage = settings.get("zero_optimization.stage")
        if stage is not None:
            same = " 0; stage 1 gives the same results with less memory" if stage == 0 else ""
            # Stage 0 becomes stage 1: the optimizer's step is the same, only its state is sharded.
            self._set("parallel.zero_stage", max(1, stage), f"zero_optimization.stage{same}")
        device = "zero_optimization.offload_optimizer.device"
        if device in settings:
            self._set("parallel.offload_optimizer", True, device)
            if settings[device] == "nvme":
                self._options.no_effect[f"{device} nvme"] = "the optimizer state stays in CPU memory"
        shards, sequence = (
            settings.get("tensor_parallel.autotp_size", 0),
            settings.get("sequence_parallel_size", 1),
        )
        if shards > 1 < sequence != shards:
            remedy = f"tensor-parallel ranks also shard the sequence: set sequence_parallel_size to {shards}"
            self._refuse("sequence_parallel_size", sequence, remedy)
        if sequence > 1:
            self._set("parallel.sequence_parallel", True, "sequence_parallel_size")
            self._set("parallel.tensor_parallel_size", sequence, "sequence_parallel_size")
        if shards > 1:
            self._set("parallel.tensor_parallel_size", shards, "tensor_parallel.autotp_size")

    def _batch(self) -> None:
        """Batch = micro-batch x accumulation steps x data-parallel ranks: two of the options suffice."""
        settings, typed = self._options.settings, self._overrides
        size = settings.get("train_batch_size", _whole(_lookup(typed, "batch.global_batch_size")))
        micro = settings.get(
            "train_micro_batch_size_per_gpu", _whole(_lookup(typed, "batch.micro_batch_size"))
        )
        passes = settings.get("gradient_accumulation_steps")
        ranks = self._data_parallel_size()
        keys = [
            key
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
            if settings.get(key) is not None
        ]
        if keys or (passes is not None and (size, micro) != (None, None)):
            key = (*keys, "gradient_accumulation_steps")[0]
            size, micro = self._derived(size, micro, passes, ranks)
            if size % (micro * ranks):
                self._options.problems.append(
                    f"deepspeed.{key} gives a global batch of {size} samples, but it must be a multiple of {micro} "
                    f"samples x {ranks} data-parallel ranks; change it, one of the other two batch options, or the "
                    "number of processes."
                )
                return
            self._set("batch.global_batch_size", size, key)
            self._set("batch.micro_batch_size", micro, key)
        if passes is not None:
            self._check_passes(passes, ranks)

    def _derived(
        self, size: int | None, micro: int | None, passes: int | None, ranks: int
    ) -> tuple[int, int]:
        """Batch and micro-batch from one of them or both, with None for the other.

        Without `passes` the tree's value of the other one stays where it divides.
        """
        tree_size = _whole(self._explicit("batch.global_batch_size"))
        tree_micro = _whole(self._explicit("batch.micro_batch_size"))
        if size is None:
            assert micro is not None, "one is given"
            fits = passes is None and tree_size is not None and tree_size % (micro * ranks) == 0
            size = tree_size if fits and tree_size else micro * ranks * (passes or 1)
        if micro is None:
            fits = passes is None and tree_micro is not None and size % (tree_micro * ranks) == 0
            micro = tree_micro if fits and tree_micro else max(1, size // (ranks * (passes or 1)))
        return size, micro

    def _check_passes(self, passes: int, ranks: int) -> None:
        batch, micro_batch = (
            _whole(self._options.settings.get(key))
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
        )
        if batch and micro_batch and batch % (micro_batch * passes):
            self._options.problems.append(
                f"deepspeed.train_batch_size ({batch}) must be a multiple of train_micro_batch_size_per_gpu "
                f"({micro_batch}) x gradient_accumulation_steps ({passes}); change or remove one of them."
            )
            return
        size, micro = self.value("batch.global_batch_size"), self.value("batch.micro_batch_size")
        if _whole(size) and _whole(micro) and size != passes * micro * ranks:
            self._options.no_effect["gradient_accumulation_steps"] = (
                f"derived from global batch {size}, micro-batch {micro} and {ranks} data-parallel ranks"
            )

    def _data_parallel_size(self) -> int:
        sizes = [
            self.value(f"parallel.{name}") for name in ("tensor_parallel_size", "pipeline_parallel_size")
        ]
        shards = sizes[0] * sizes[1] if all(_whole(size) for size in sizes) else 1
        return max(1, self._processes // shards)  # where the shards do not divide it, the start is refused

    def _optimizer(self, block: Mapping[str, Any]) -> None:
        kinds = _ADAM | _ADAM_KERNELS | dict.fromkeys(_ADAM_REFUSED, "flag")
        if not self._keys_known("optimizer", block, ("type", "params", "legacy_fusion")):
            return
        name, given = block.get("type"), block.get("params") or {}
        kind = str(name).lower()
        if kind not in ("adam", "adamw"):
            known = ", ".join(_field("optimizer.kind").metadata["one_of"])
            remedy = f"only Adam and AdamW are read: set optimizer.kind, one of {known}, and remove the block"
            self._refuse("optimizer.type", name, remedy)
            return
        params = self._parameters("optimizer", given, kinds)
        for param, supported in _ADAM_REFUSED.items():
            if params.get(param, supported) is not supported:
                remedy = f"AdamW here computes other numbers: set it to {shown(supported)}"
                self._refuse(f"optimizer.params.{param}", params[param], remedy)
        chosen = [f"optimizer.params.{param}" for param in _ADAM_KERNELS if params.get(param)]
        self._options.no_effect |= dict.fromkeys(chosen, "set optimizer.kernel instead")
        betas = params.get("betas")
        if betas is not None and len(betas) != 2:
            self._refuse("optimizer.params.betas", list(betas), "it must be two numbers")
            betas = None
        self._set("optimizer.kind", "adamw", "optimizer.type")
        for setting in ("bias_correction", "momentum"):  # other optimizers' own, which AdamW does not read
            if self._explicit(f"optimizer.{setting}") is not None:
                self._set(f"optimizer.{setting}", _default(f"optimizer.{setting}"), "optimizer.type")
        for setting, param, value, default in (
            ("lr", "lr", params.get("lr"), 1e-3),
            ("beta1", "betas", betas and betas[0], 0.9),
            ("beta2", "betas", betas and betas[1], 0.999),
            ("eps", "eps", params.get("eps"), 1e-8),
            ("weight_decay", "weight_decay", params.get("weight_decay"), 0.0),
        ):
            # A file that names the optimizer and not the parameter was trained with DeepSpeed's default, which
            # is not the default here.
            if value is None and param not in given and self._explicit(f"optimizer.{setting}") is None:
                value = default  # DeepSpeed's default: neither file says it
            if value is not None:
                self._set(f"optimizer.{setting}", value, f"optimizer.params.{param}")
        decay = self.value("optimizer.weight_decay")
        # Without decay both modes are the same.
        if kind == "adam" and params.get("adam_w_mode") is False and not _equal(decay, 0):
            remedy = "weight decay is always decoupled: set adam_w_mode to true, or weight_decay to 0"
            self._refuse("optimizer.params.adam_w_mode", False, remedy)
        clip, other = params.get("max_grad_norm"), self._options.settings.get("gradient_clipping")
        if clip and other is not None and clip != other:
            remedy = f"but gradient_clipping is {other}: remove one of them"
            self._refuse("optimizer.params.max_grad_norm", clip, remedy)
        elif clip:
            self._set("optimizer.clip_grad_norm", clip, "optimizer.params.max_grad_norm")

    def _scheduler(self, block: Mapping[str, Any]) -> None:
        if not self._keys_known("scheduler", block, ("type", "params")):
            return
        name, given = block.get("type"), block.get("params") or {}
        if not isinstance(name, str) or name not in _SCHEDULES:
            known = ", ".join(_SCHEDULES)
            remedy = f"only DeepSpeed's {known} are supported: use the section schedule instead, and remove this block"
            self._refuse("scheduler.type", name, remedy)
            return
        kind, kinds = _SCHEDULES[name]
        problems = len(self._options.problems)
        params = self._parameters("scheduler", given, kinds)
        if "total_num_steps" in kinds and "total_num_steps" not in given:
            self._refuse("scheduler.type", name, "set total_num_steps in its params, or auto")
        first = floor = self._lowest(name, given, params)
        if name == "WarmupCosineLR":
            first = params.get("warmup_min_ratio", 0.0)
            floor = params.get("cos_min_ratio", 1e-4)
            if given.get("cos_min_ratio") == "auto":
                floor = self.value("schedule.min_lr_ratio")
        if len(self._options.problems) > problems:
            return
        if "warmup_num_steps" not in given:
            params["warmup_num_steps"] = 1000  # DeepSpeed's default
        for setting, value in (
            ("kind", kind),
            ("warmup_steps", params.get("warmup_num_steps")),
            ("decay_steps", params.get("total_num_steps")),
            ("min_lr_ratio", floor),
            ("warmup_kind", params.get("warmup_type", "log")),
            ("warmup_start_ratio", first),
            # The file's schedule replaces the tree's schedule.parts.
            ("parts", []),
        ):
            if value is not None:  # else it is "auto": the tree decides
                self._set(f"schedule.{setting}", value, "scheduler")

    def _lowest(self, name: str, given: Mapping[str, Any], params: Mapping[str, Any]) -> float:
        """Where WarmupLR begins and WarmupDecayLR ends too, as a fraction of the peak, which is set."""
        if name == "WarmupCosineLR":
            return 0.0
        default = 1e-3 if name == "WarmupDecayLR" and "warmup_max_lr" not in given else None
        peak, lowest = params.get("warmup_max_lr", default), params.get("warmup_min_lr", 0.0)
        if peak is not None:
            self._set("optimizer.lr", peak, "scheduler.params.warmup_max_lr")
        peak = self.value("optimizer.lr")
        try:
            peak = float(peak)
        except (TypeError, ValueError):
            return 0.0  # the settings refuse it
        if not 0 <= lowest <= peak or peak == 0:
            remedy = f"it must be between 0 and the peak ({shown(peak)}), and the peak must be above 0"
            self._refuse("scheduler.params.warmup_min_lr", lowest, remedy)
            return 0.0
        return float(lowest / peak)

    def _keys_known(self, name: str, block: Mapping[str, Any], known: tuple[str, ...]) -> bool:
        wrong = [key for key in block if key not in known and not str(key).startswith(COMMENTS)]
        for key in wrong:
            self._options.problems.append(
                f"unknown setting deepspeed.{name}.{key}; valid keys here are {', '.join(known)}; others are in params."
            )
        params = block.get("params")
        if not isinstance(params, Mapping) and params not in (None, "auto"):
            self._refuse(f"{name}.params", params, "it must be a mapping: write its keys, or remove it")
            return False
        return not wrong and params != "auto"

    def _parameters(self, name: str, given: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
        """The parameters of a block that are neither null nor "auto", in their types."""
        cls = option_class(name, kinds)
        found: dict[str, Any] = {}
        for key, value in given.items():
            if str(key).startswith(COMMENTS) or (key in kinds and value in (None, "auto")):
                continue
            try:
                found[key] = getattr(build(cls, {key: value}, f"deepspeed.{name}.params."), str(key))
            except ConfigError as error:
                self._options.problems.append(str(error))
        return found


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None if there is none."""
    for name in key.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(name)  # type: ignore[assignment]
    return tree


def _whole(value: Any) -> int | None:
    """A whole number above 0, else None: the settings refuse what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are one setting: YAML reads 1e-4 as text."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return (one or None) == (other or None) if isinstance(one, (list, tuple)) else bool(one == other)


def _default(setting: str) -> Any:
    return _field(setting).default


def _field(setting: str) -> Any:
    name, _, key = setting.partition(".")
    return _DEFAULTS[name].__dataclass_fields__[key]  # type: ignore[attr-defined]
