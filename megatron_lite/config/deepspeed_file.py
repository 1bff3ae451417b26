"""A user's DeepSpeed options -> settings of this project, and what remains for DeepSpeed.

`read_options` sorts options by the policies of deepspeed_keys.py. `with_deepspeed` replaces the section `deepspeed` of
a tree of settings, with a DeepSpeed file on top of it, by the settings that they mean. What the options leave out or
call "auto" stays as the tree says; where that says nothing either, DeepSpeed's default holds in a block that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_hjson, shown
from data_utils.common.settings import build, merge, nest, section, to_tree
from megatron_lite.config.deepspeed_keys import (
    ALIASES,
    FORMER_FLAGS,
    KEYS,
    Options,
    Policy,
    option_class,
)
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.sections import BatchConfig, OptimizerConfig, ParallelConfig, TrainingConfig

_ROOT = make_dataclass("Root", [("deepspeed", Options, section(Options))], frozen=True, kw_only=True)
_SECTIONS = {key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)}
_COMMENTS = ("_", "#", "//", "comment")  # JSON has no comments, so that people write them as keys
_OFFLOADS = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")
_DEFAULTS = {
    "batch": BatchConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig, "parallel": ParallelConfig,
    "training": TrainingConfig,
}  # fmt: skip


# Options by policy


@dataclass
class Said:
    """What options say. Keys are dotted, in the spelling of the table."""

    ours: dict[str, Any] = field(default_factory=dict)
    handed: dict[str, Any] = field(default_factory=dict)
    stage_3: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)  # key -> why it has no effect
    problems: list[str] = field(default_factory=list)  # a sentence each

    def for_deepspeed(self, stage: int) -> dict[str, Any]:
        """The nested mapping that is handed on at a ZeRO stage."""
        options: dict[str, Any] = {}
        for key, value in (self.handed | (self.stage_3 if stage == 3 else {})).items():
            options = merge(options, nest(key, value))
        return options

    def without_effect(self, stage: int) -> dict[str, str]:
        """Key -> reason, at a ZeRO stage."""
        if stage == 3:
            return self.idle
        asked = {key: KEYS[key] for key, value in self.stage_3.items() if value not in KEYS[key].fine}
        return self.idle | {key: row.reason for key, row in asked.items()}

    def refuse(self, source: str = "") -> None:
        """Raise ConfigError with all problems in one line, if there are any."""
        if not self.problems:
            return
        begin = f"{source}: " if source else ""
        if len(self.problems) > 1:
            begin += f"{len(self.problems)} DeepSpeed options must change. "
        raise ConfigError(begin + " ".join(dict.fromkeys(self.problems)))


def read_options(given: Mapping[str, Any]) -> Said:
    """Sort options by policy. It raises nothing: problems are part of the result."""
    said = Said()
    seen: dict[str, tuple[str, Any]] = {}  # key -> as it is written, value
    for written, key, value in _leaves(given, "", ""):
        if key in seen and seen[key][1] != value:
            said.problems.append(
                f"deepspeed.{written} and deepspeed.{seen[key][0]} are the same option; remove one."
            )
        row = KEYS.get(key)
        # "auto" asks the program that reads the file to decide: here our settings do.
        if key in seen or (row is not None and (value is None or value == "auto")):
            continue
        seen[key] = written, value
        try:
            value = _checked(key, value, row.kind if row is not None else "")
        except ConfigError as error:
            said.problems.append(str(error))
            continue
        assert row is not None, "unknown keys are refused"
        if row.policy is Policy.OURS:
            said.ours[key] = value
        elif row.policy is Policy.HANDED:
            said.handed[key] = value
        elif row.policy is Policy.STAGE_3:
            said.stage_3[key] = value
        # Refused is what would train otherwise; a refused feature that is off changes nothing.
        elif value in row.fine or (row.kind in ("free", "switch") and _is_off(value, row.kind)):
            continue
        elif row.policy is Policy.IDLE:
            said.idle[key] = row.reason
        else:
            what = "is on" if row.kind == "switch" else f"is {shown(value)}"
            said.problems.append(f"deepspeed.{key} {what}: {row.reason}.")
    return said


def _leaves(tree: Mapping[str, Any], written: str, path: str) -> Iterator[tuple[str, str, Any]]:
    """Options below a section: as they are written, the key of the table, and the value."""
    for name, value in tree.items():
        if str(name).startswith(_COMMENTS):
            continue
        as_written, key = f"{written}{name}", f"{path}{name}"
        key = ALIASES.get(key, key)
        if key == "zero_optimization" and isinstance(value, bool):  # its first form
            if value:
                yield as_written, "zero_optimization.stage", 1
        elif key in FORMER_FLAGS and (value is None or value == "auto" or isinstance(value, bool)):
            if value is True:
                yield as_written, *FORMER_FLAGS[key]
        elif key not in _SECTIONS or not (isinstance(value, Mapping) or value in (None, "auto", False)):
            yield as_written, key, value
        elif isinstance(value, Mapping):
            yield from _of_section(value, f"{as_written}.", key)


def _of_section(section: Mapping[str, Any], written: str, key: str) -> Iterator[tuple[str, str, Any]]:
    # The other keys of an offload say nothing where nothing is offloaded.
    if key in _OFFLOADS and section.get("device") in (None, "none", "auto"):
        return
    switch = KEYS.get(f"{key}.enabled")
    if switch is not None and section.get("enabled") is False:
        section = {"enabled": False}
    if (
        switch is not None
        and switch.policy is Policy.HANDED
        and section.get("enabled") in (None, "auto", False)
    ):
        return  # DeepSpeed's default is off
    yield from _leaves(section, written, f"{key}.")


def _checked(key: str, value: Any, kind: str) -> Any:
    """The value in the table's type. Raises: ConfigError, which names the nearest key of one that is unknown."""
    if kind in ("free", "switch") and value is False:
        return {"enabled": False}
    if kind == "dtype" and isinstance(value, str):
        value = value.lower()  # as DeepSpeed does
    found = to_tree(build(_ROOT, nest(f"deepspeed.{key}", value)))["deepspeed"]
    for name in key.split("."):
        found = found[name]
    return found


def _is_off(section: Mapping[str, Any], kind: str) -> bool:
    """Whether a section turns nothing on. Args: kind: "switch" = off unless its `enabled`, or one below, is true."""
    if "device" in section:
        return section["device"] in (None, "none", "auto")
    state = _state(section)
    return state is False or (state is None and (kind == "switch" or not section))


def _state(section: Mapping[str, Any]) -> bool | None:
    """The section's `enabled`, else whether one of its parts is; None = nothing says so."""
    if section.get("enabled") is not None:
        return section["enabled"] not in (False, "auto")
    states = [_state(part) for part in section.values() if isinstance(part, Mapping)]
    known = [state for state in states if state is not None]
    return any(known) if known else None


# Options as settings


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
    problems: list[str] = []
    if path is not None:
        of_file, typed = load_hjson(path, "DeepSpeed configuration"), overrides.get("deepspeed") or {}
        problems = list(_contradictions(of_file, typed, "deepspeed."))
        # A DeepSpeed file stands between the YAML files and the command line.
        given = merge(merge(given, of_file), typed)
    source = str(path) if path is not None else ""
    said = read_options(given)
    said.problems += problems
    translation = _Translation(tree, overrides, said, processes)
    translation.run()
    said.refuse(source)
    stage = translation.value("parallel.zero_stage")
    made = merge(tree, {"deepspeed": None})
    for key, (value, _) in translation.settings.items():
        made = merge(made, nest(key, value))
    made["deepspeed"] = said.for_deepspeed(stage)
    for line in (translation.changes(), _idle_line(said.without_effect(stage))) if say is not None else ():
        if line:
            say(f"{source or 'the section deepspeed'} {line}")  # type: ignore[misc]
    return made


def _contradictions(of_file: Mapping[str, Any], typed: Mapping[str, Any], path: str) -> Iterator[str]:
    for key in of_file.keys() & typed.keys():
        one, other = of_file[key], typed[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _contradictions(one, other, f"{path}{key}.")
        elif one not in (None, "auto") and other not in (None, "auto") and not _equal(one, other):
            yield f"{path}{key} is {shown(one)} in the file but {shown(other)} as an override; make them equal."


def _idle_line(idle: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for key, reason in idle.items():
        by_reason.setdefault(reason, []).append(key)
    parts = [f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    return f"has options without effect: {'; '.join(parts)}" if parts else ""


_ADAM = {
    "lr": "number", "betas": "numbers", "eps": "number", "weight_decay": "number", "bias_correction": "flag",
    "adam_w_mode": "flag", "amsgrad": "flag", "max_grad_norm": "number", "torch_adam": "flag", "fused": "flag",
    "foreach": "flag", "capturable": "flag", "differentiable": "flag", "set_grad_none": "flag", "maximize": "flag",
    "fp32_optimizer_states": "flag", "eps_inside_sqrt": "flag",
}  # fmt: skip
# Parameters under which DeepSpeed's Adam computes other numbers than ours: the value that is fine, and the remedy.
_ADAM_REFUSED = {
    "bias_correction": (True, "AdamW here uses bias correction"),
    "amsgrad": (False, "AMSGrad is not supported"),
    "maximize": (False, "the loss is always minimized"),
    "fp32_optimizer_states": (True, "the optimizer state is always fp32"),
    "eps_inside_sqrt": (False, "AdamW here adds eps outside the square root"),
}
_ADAM_KERNELS = (
    "torch_adam",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
)  # which compute the same numbers
_OTHER_OPTIMIZERS = {
    "lamb": "DeepSpeed's LAMB clamps the trust ratio, optimizer.kind=lamb does not",
    "onebitadam": "1-bit compression is not supported",
    "zerooneadam": "1-bit compression is not supported",
    "onebitlamb": "1-bit compression is not supported",
    "muon": "DeepSpeed's Muon covers other matrices and uses other scale factors than optimizer.kind=muon",
}
_WARMUP = {"warmup_num_steps": "count", "warmup_type": "text", "last_batch_iteration": "whole"}
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
    """Settings that options mean. Problems and options without effect go to `said`."""

    def __init__(
        self,
        tree: Mapping[str, Any],
        overrides: Mapping[str, Any],
        said: Said,
        processes: int,
    ) -> None:
        self._tree, self._overrides, self._said, self._processes = tree, overrides, said, processes
        self.settings: dict[
            str, tuple[Any, str]
        ] = {}  # dotted setting -> value, the DeepSpeed key that says it

    def run(self) -> None:
        # The layout comes before the batch, which depends on the number of data-parallel ranks.
        self._precision()
        self._layout()
        self._batch()
        clip = self._said.ours.get("gradient_clipping")
        if clip is not None:
            self._set("optimizer.clip_grad_norm", clip, "gradient_clipping")
        if "optimizer" in self._said.ours:
            self._optimizer(self._said.ours["optimizer"])
        if "scheduler" in self._said.ours:
            self._scheduler(self._said.ours["scheduler"])
        for setting, (value, key) in self.settings.items():
            # What was typed and the file both claim to decide: neither is dropped in silence.
            typed = _lookup(self._overrides, setting)
            if typed is not None and not _equal(typed, value):
                self._said.problems.append(
                    f"{setting}={typed} contradicts deepspeed.{key}, which sets it to {value}; remove one of them."
                )

    def value(self, setting: str) -> Any:
        """What the options make of a setting, else the tree, else its default."""
        if setting in self.settings:
            return self.settings[setting][0]
        given = self._explicit(setting)
        return _default(setting) if given is None else given

    def changes(self) -> str:
        """What the options change, in words; empty for nothing."""
        parts = []
        for setting, (value, key) in self.settings.items():
            given = self._explicit(setting)
            before = _default(setting) if given is None else given
            if not _equal(before, value):
                parts.append(f"{setting}={shown(value)} (was {shown(before)}; {key})")
        return f"sets {', '.join(parts)}" if parts else ""

    def _set(self, setting: str, value: Any, key: str) -> None:
        self.settings[setting] = value, key

    def _explicit(self, setting: str) -> Any:
        """The tree's own value of a setting, None where it says nothing."""
        return _lookup(self._tree, setting)

    def _refuse(self, key: str, value: Any, remedy: str) -> None:
        self._said.problems.append(f"deepspeed.{key} is {shown(value)}: {remedy}.")

    def _precision(self) -> None:
        enabled = {name: self._said.ours.get(f"{name}.enabled") for name in ("fp16", "bf16")}
        if all(enabled.values()):
            self._refuse("fp16.enabled", True, "bf16.enabled is true too: keep one of them")
            return
        for name, on in enabled.items():
            if on:
                self._set("training.precision", name, f"{name}.enabled")
        now = self.value("training.precision")
        # The file switches off what our setting asks for: then neither half precision is left.
        if enabled.get(now) is False:
            self._set("training.precision", "fp32", f"{now}.enabled")

    def _layout(self) -> None:
        ours = self._said.ours
        stage = ours.get("zero_optimization.stage")
        if stage is not None:
            same = " 0; stage 1 gives the same results with less memory" if stage == 0 else ""
            # Stage 0 is stage 1 here: the optimizer's step is the same for all stages, only the place of its
            # state differs.
            self._set("parallel.zero_stage", max(1, stage), f"zero_optimization.stage{same}")
        device = "zero_optimization.offload_optimizer.device"
        if device in ours:
            self._set("parallel.offload_optimizer", True, device)
            if ours[device] == "nvme":
                self._said.idle[f"{device} nvme"] = "the optimizer state stays in CPU memory"
        shards, sequence = ours.get("tensor_parallel.autotp_size", 0), ours.get("sequence_parallel_size", 1)
        if shards > 1 < sequence != shards:
            remedy = f"tensor-parallel ranks also shard the sequence: set sequence_parallel_size to {shards}"
            self._refuse("sequence_parallel_size", sequence, remedy)
        if sequence > 1:
            self._set("parallel.sequence_parallel", True, "sequence_parallel_size")
            self._set("parallel.tensor_parallel_size", sequence, "sequence_parallel_size")
        if shards > 1:
            self._set("parallel.tensor_parallel_size", shards, "tensor_parallel.autotp_size")

    def _batch(self) -> None:
        """As DeepSpeed derives it: of batch, micro-batch and passes two give the third, on so many ranks."""
        ours, typed = self._said.ours, self._overrides
        size = ours.get("train_batch_size", _whole(_lookup(typed, "batch.global_batch_size")))
        micro = ours.get("train_micro_batch_size_per_gpu", _whole(_lookup(typed, "batch.micro_batch_size")))
        passes = ours.get("gradient_accumulation_steps")
        ranks = self._data_parallel_size()
        keys = [
            key for key in ("train_batch_size", "train_micro_batch_size_per_gpu") if ours.get(key) is not None
        ]
        if keys or (passes is not None and (size, micro) != (None, None)):
            key = (*keys, "gradient_accumulation_steps")[0]
            size, micro = self._derived(size, micro, passes, ranks)
            if size % (micro * ranks):
                self._said.problems.append(
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
        """Batch and micro-batch from one of them or both. Without passes the tree's other one stays where it fits."""
        size_here = _whole(self._explicit("batch.global_batch_size"))
        micro_here = _whole(self._explicit("batch.micro_batch_size"))
        if size is None:
            assert micro is not None, "one is given"
            fits = passes is None and size_here is not None and size_here % (micro * ranks) == 0
            size = size_here if fits and size_here else micro * ranks * (passes or 1)
        if micro is None:
            fits = passes is None and micro_here is not None and size % (micro_here * ranks) == 0
            micro = micro_here if fits and micro_here else max(1, size // (ranks * (passes or 1)))
        return size, micro

    def _check_passes(self, passes: int, ranks: int) -> None:
        whole, part = (
            _whole(self._said.ours.get(key)) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
        )
        if whole and part and whole % (part * passes):
            self._said.problems.append(
                f"deepspeed.train_batch_size ({whole}) must be a multiple of train_micro_batch_size_per_gpu "
                f"({part}) x gradient_accumulation_steps ({passes}); change or remove one of them."
            )
            return
        size, micro = self.value("batch.global_batch_size"), self.value("batch.micro_batch_size")
        if _whole(size) and _whole(micro) and size != passes * micro * ranks:
            self._said.idle["gradient_accumulation_steps"] = (
                f"derived from global batch {size}, micro-batch {micro} and {ranks} data-parallel ranks"
            )

    def _data_parallel_size(self) -> int:
        sizes = [
            self.value(f"parallel.{name}") for name in ("tensor_parallel_size", "pipeline_parallel_size")
        ]
        shards = sizes[0] * sizes[1] if all(_whole(size) for size in sizes) else 1
        return max(1, self._processes // shards)  # where it does not divide, the start is refused

    def _optimizer(self, block: Mapping[str, Any]) -> None:
        if not self._keys_known("optimizer", block, ("type", "params", "legacy_fusion")):
            return
        name, given = block.get("type"), block.get("params") or {}
        if block.get("legacy_fusion"):
            self._said.idle["optimizer.legacy_fusion"] = "set optimizer.kernel instead"
        if name is None:
            if given:
                self._said.idle["optimizer.params"] = "optimizer.type is missing"
            return
        kind = str(name).lower()
        if kind not in ("adam", "adamw"):
            why = _OTHER_OPTIMIZERS.get(kind, "there is no such optimizer here")
            remedy = (
                "set optimizer.kind, one of " + _default_range("optimizer.kind") + ", and remove the block"
            )
            self._refuse("optimizer.type", name, f"{why}: {remedy}")
            return
        params = self._parameters("optimizer", given, _ADAM)
        for param, (fine, why) in _ADAM_REFUSED.items():
            if params.get(param, fine) is not fine:
                self._refuse(f"optimizer.params.{param}", params[param], f"{why}: set it to {shown(fine)}")
        for param in _ADAM_KERNELS:
            if params.get(param):
                self._said.idle[f"optimizer.params.{param}"] = "set optimizer.kernel instead"
        betas = params.get("betas")
        if betas is not None and len(betas) != 2:
            self._refuse("optimizer.params.betas", list(betas), "it must be two numbers")
            betas = None
        self._set("optimizer.kind", "adamw", "optimizer.type")
        for setting in ("bias_correction", "momentum"):  # other optimizers' own, which AdamW does not read
            if self._explicit(f"optimizer.{setting}") is not None:
                self._set(f"optimizer.{setting}", _default(f"optimizer.{setting}"), "optimizer.type")
        for setting, param, value, usual in (
            ("lr", "lr", params.get("lr"), 1e-3),
            ("beta1", "betas", betas and betas[0], 0.9),
            ("beta2", "betas", betas and betas[1], 0.999),
            ("eps", "eps", params.get("eps"), 1e-8),
            ("weight_decay", "weight_decay", params.get("weight_decay"), 0.0),
        ):
            # A file that names the optimizer and not the parameter was trained with DeepSpeed's default, which
            # is not ours.
            if value is None and param not in given and self._explicit(f"optimizer.{setting}") is None:
                value = usual  # DeepSpeed's default: neither file says it
            if value is not None:
                self._set(f"optimizer.{setting}", value, f"optimizer.params.{param}")
        decay = self.value("optimizer.weight_decay")
        # Without decay both modes are the same.
        if kind == "adam" and params.get("adam_w_mode") is False and not _equal(decay, 0):
            remedy = "weight decay is always decoupled: set adam_w_mode to true, or weight_decay to 0"
            self._refuse("optimizer.params.adam_w_mode", False, remedy)
        clip, other = params.get("max_grad_norm"), self._said.ours.get("gradient_clipping")
        if clip and other is not None and clip != other:
            remedy = f"but gradient_clipping is {other}: remove one of them"
            self._refuse("optimizer.params.max_grad_norm", clip, remedy)
        elif clip:
            self._set("optimizer.clip_grad_norm", clip, "optimizer.params.max_grad_norm")

    def _scheduler(self, block: Mapping[str, Any]) -> None:
        if not self._keys_known("scheduler", block, ("type", "params")):
            return
        name, given = block.get("type"), block.get("params") or {}
        if name is None:
            if given:
                self._said.idle["scheduler.params"] = "scheduler.type is missing"
            return
        if not isinstance(name, str) or name not in _SCHEDULES:
            known = ", ".join(_SCHEDULES)
            remedy = f"only DeepSpeed's {known} are supported: use the section schedule instead, and remove this block"
            self._refuse("scheduler.type", name, remedy)
            return
        kind, kinds = _SCHEDULES[name]
        problems = len(self._said.problems)
        params = self._parameters("scheduler", given, kinds)
        if params.get("last_batch_iteration", -1) != -1:
            remedy = "the schedule depends on the step only: remove it"
            self._refuse("scheduler.params.last_batch_iteration", params["last_batch_iteration"], remedy)
        if params.get("warmup_type", "log") not in ("log", "linear"):
            self._refuse("scheduler.params.warmup_type", params["warmup_type"], "it must be log or linear")
        if "total_num_steps" in kinds and "total_num_steps" not in given:
            self._refuse("scheduler.type", name, "set total_num_steps in its params, or auto")
        first = floor = self._lowest(name, given, params)
        if name == "WarmupCosineLR":
            first = params.get("warmup_min_ratio", 0.0)
            floor = params.get("cos_min_ratio", 1e-4)
            if given.get("cos_min_ratio") == "auto":
                floor = self.value("schedule.min_lr_ratio")
        if len(self._said.problems) > problems:
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
            # The file's schedule replaces the parts of ours.
            ("parts", []),
        ):
            if value is not None:  # else it is "auto": ours decides
                self._set(f"schedule.{setting}", value, "scheduler")

    def _lowest(self, name: str, given: Mapping[str, Any], params: Mapping[str, Any]) -> float:
        """Where WarmupLR begins and WarmupDecayLR ends too, as a fraction of the peak, which is set."""
        if name == "WarmupCosineLR":
            return 0.0
        usual = 1e-3 if name == "WarmupDecayLR" and "warmup_max_lr" not in given else None
        peak, lowest = params.get("warmup_max_lr", usual), params.get("warmup_min_lr", 0.0)
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
        wrong = [key for key in block if key not in known and not str(key).startswith(_COMMENTS)]
        for key in wrong:
            remedy = f"unknown setting deepspeed.{name}.{key}; valid keys here are {', '.join(known)}."
            self._said.problems.append(remedy)
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
            if str(key).startswith(_COMMENTS) or (key in kinds and value in (None, "auto")):
                continue
            try:
                found[key] = getattr(build(cls, {key: value}, f"deepspeed.{name}.params."), str(key))
            except ConfigError as error:
                self._said.problems.append(str(error))
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
    name, _, key = setting.partition(".")
    return _DEFAULTS[name].__dataclass_fields__[key].default  # type: ignore[attr-defined]


def _default_range(setting: str) -> str:
    name, _, key = setting.partition(".")
    return ", ".join(_DEFAULTS[name].__dataclass_fields__[key].metadata["range"].one_of)  # type: ignore[attr-defined]
