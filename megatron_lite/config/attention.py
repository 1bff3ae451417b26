"""The implementations of attention on a GPU: what each takes, and which one `training.attention` chooses.

Needs no torch, so that settings are refused before it is imported. `auto` and a name are held to the same table.

fa2 (FlashAttention 2) and torch (the memory-efficient kernel) are in torch. fa3 and fa4 are packages, which a switch of
torch puts in place of fa2. Sources of the limits: sdp_utils.cpp, torch.nn.attention._fa3 and _fa4 of torch 2.13, and of
the packages flash_api.cpp of hopper and flash_attn.cute.interface of August 2026.

Kernels of this program compute what no implementation can: a bias of the scores, and a mask that must be evaluated.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from data_utils.common.errors import ConfigError

Config = Any  # tree.Config: its files import this one, and imports go one way
Capability = tuple[int, int]  # of CUDA: 8.0 is Ampere, 9.0 Hopper, 10.0 Blackwell
AMPERE: Capability = (8, 0)  # the first with bf16
HEAD_MULTIPLE = 8  # features: of every implementation in half precision
LARGEST_HEAD = 256  # of FlashAttention; `torch` takes larger ones, which have not been tried here
LARGEST_HEAD_OF_RULE = 128  # of this program's kernels: more does not fit into a processor's shared memory


@dataclass(frozen=True)
class Package:
    """Where an implementation comes from that is not part of torch."""

    name: str
    install: str
    # The first and the last that torch 2.13 calls correctly; None = any.
    versions: tuple[str, str] | None = None

    @property
    def problem(self) -> str | None:
        """Why it cannot be used here, None if it can."""
        # By its name: packages of FlashAttention 2 may bring a folder of fa4's modules.
        try:
            version = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "is not installed"
        if self.versions is not None and importlib.metadata.version("torch").startswith("2.13."):
            from packaging.version import Version  # few starts need it

            first, last = self.versions
            if not Version(first) <= Version(version) <= Version(last):
                return f"has version {version}, and torch 2.13 calls only {first} to {last} correctly"
        return None


@dataclass(frozen=True)
class Implementation:
    """What an implementation takes."""

    gpus: str  # in words
    runs_on: Callable[[Capability], bool]
    precisions: tuple[str, ...] = ("bf16", "fp16")
    has_dropout: bool = False
    has_window: bool = True
    largest_head: int = LARGEST_HEAD
    largest_deterministic_head: int = LARGEST_HEAD
    # Whether a GPU does not run a head size with a probability of dropout that others do.
    lacks: Callable[[Capability, int, float], bool] = lambda capability, head_size, dropout: False
    package: Package | None = None

    def largest(self, deterministic: bool) -> int:
        """The largest head size. Args: deterministic: `training.deterministic`."""
        return self.largest_deterministic_head if deterministic else self.largest_head

    @property
    def is_here(self) -> bool:
        """Whether this machine has it, whatever its GPU."""
        return self.package is None or self.package.problem is None


def _has_little_shared_memory(capability: Capability, head_size: int, dropout: float) -> bool:
    """Whether FlashAttention 2 has no backward pass on GPUs of compute capability 8.6 to 8.9 and 12.x."""
    is_small = capability[0] == 12 or (capability[0] == 8 and capability != AMPERE)
    return is_small and head_size > 192 and (head_size <= 224 or dropout > 0)


IMPLEMENTATIONS = {
    "fa3": Implementation(
        "Hopper (compute capability 9.0)",
        lambda capability: capability[0] == 9,
        largest_deterministic_head=192,
        package=Package(
            "flash_attn_3",
            "install it from the directory hopper of https://github.com/Dao-AILab/flash-attention",
        ),
    ),
    "fa4": Implementation(
        "Hopper and Blackwell (compute capability 9.0 and 10.x)",
        lambda capability: capability[0] in (9, 10),
        largest_head=128,
        largest_deterministic_head=128,
        # The next one, 4.0.0b19, returns four tensors where torch 2.13 takes two.
        package=Package("flash-attn-4", "pip install flash-attn-4==4.0.0b18", ("4.0.0b5", "4.0.0b18")),
    ),
    "fa2": Implementation(
        "Ampere and later (compute capability 8.0)",
        lambda capability: capability >= AMPERE,
        has_dropout=True,
        lacks=_has_little_shared_memory,
    ),
    "torch": Implementation(
        "any GPU", lambda capability: True, ("bf16", "fp16", "fp32"), has_dropout=True, has_window=False
    ),
}
CHOICES = ("auto", *sorted(IMPLEMENTATIONS))


@dataclass(frozen=True)
class Choice:
    """The implementation of a run on a GPU."""

    name: str
    why: str


@dataclass(frozen=True)
class Stack:
    """Attention of one Transformer of a run."""

    section: str  # of its settings
    model: Any  # ModelConfig
    head_size: int
    what: str  # the settings that the head size is of, in words

    @property
    def is_launched(self) -> bool:
        """Whether an implementation computes some of it: what has no bias of the scores, as cross-attention."""
        return self.model.relative == "none" or self.model.decoder_layers > 0


@dataclass(frozen=True)
class LaunchType:
    """What may decide that an implementation does not take a launch; each has launches with and without causal mask."""

    head_size: int
    window: int
    dropout: float


def _stacks(config: Config) -> Iterator[Stack]:
    """The Transformers of a run."""
    sections = {"model": config.model} | ({"decoder": config.decoder} if config.decoder is not None else {})
    for name, model in sections.items():
        what = f"{name}.head_dim" if model.head_dim else f"{name}.hidden_size over num_attention_heads"
        yield Stack(name, model, model.head_size, what)
    for choice in config.objective_choices:
        for what, size in choice.section.further_head_sizes(config.model.hidden_size).items():
            yield Stack("model", config.model, size, what)


def launch_types(config: Config) -> list[LaunchType]:
    """The launches of a run that differ, each once; [] where kernels of this program compute all of its attention."""
    found: list[LaunchType] = []
    for stack in filter(lambda stack: stack.is_launched, _stacks(config)):
        windows = [0] if stack.model.relative != "none" else [0, stack.model.attention_window]
        found += [LaunchType(stack.head_size, window, stack.model.attention_dropout) for window in windows]
    return list(dict.fromkeys(found))


def misfits(name: str, config: Config, capability: Capability | None = None) -> list[str]:
    """The settings that an implementation does not take, with their values; empty = it takes all of them.

    Args: capability: of the GPU; None = what holds on every one.
    """
    implementation, training = IMPLEMENTATIONS[name], config.training
    found = []
    if capability is not None and not implementation.runs_on(capability):
        found.append(f"this GPU has compute capability {_shown(capability)}")
    if training.precision not in implementation.precisions:
        found.append(f"training.precision is {training.precision}")
    if training.precision == "bf16" and capability is not None and capability < AMPERE:
        found.append(f"training.precision is bf16, which begins with compute capability {_shown(AMPERE)}")
    for stack in filter(lambda stack: stack.is_launched, _stacks(config)):
        section, model, size = stack.section, stack.model, stack.head_size
        if model.attention_dropout and not implementation.has_dropout:
            found.append(f"{section}.attention_dropout is {model.attention_dropout:g}")
        if model.attention_window and not implementation.has_window:
            found.append(f"{section}.attention_window is {model.attention_window}")
        if size % HEAD_MULTIPLE or size > implementation.largest(training.deterministic):
            found.append(f"{stack.what} is {size}")
        elif capability is not None and implementation.lacks(capability, size, model.attention_dropout):
            found.append(
                f"{stack.what} is {size}, which GPUs of compute capability {_shown(capability)} do not train"
            )
    return list(dict.fromkeys(found))


def _shown(capability: Capability) -> str:
    return ".".join(map(str, capability))


def takes(name: str, config: Config) -> str:
    """In words: the GPUs and settings with which an implementation runs."""
    implementation = IMPLEMENTATIONS[name]
    limits = [f"training.precision {' or '.join(implementation.precisions)}"]
    limits += ["attention_dropout 0"] * (not implementation.has_dropout)
    limits += ["attention_window 0"] * (not implementation.has_window)
    largest = implementation.largest(config.training.deterministic)
    return (
        f"{name} takes {implementation.gpus}, {', '.join(limits)}, heads of a multiple of {HEAD_MULTIPLE} up to "
        f"{largest}"
    )


def check_attention(config: Config) -> None:
    """Raise ConfigError where a chosen implementation does not take the settings; all that it does not take at once."""
    name = config.training.attention
    if name == "auto":
        return
    relative = _relative(config)
    if relative:
        raise ConfigError(
            f"training.attention is {name}, but {relative}, for which attention on GPUs is a kernel of "
            "this program; set training.attention to auto."
        )
    _require_fit(name, config, misfits(name, config))


def _require_fit(name: str, config: Config, found: list[str]) -> None:
    if found:
        raise ConfigError(
            f"training.attention is {name}, but {', '.join(found)}; {takes(name, config)}: change these, or set "
            "training.attention to auto."
        )


def _relative(config: Config) -> str:
    """The settings with which attention is a kernel of this program, with their values; "" = none."""
    found = {stack.section: stack.model.relative for stack in _stacks(config)}
    return " and ".join(
        f"{section}.relative is {value}" for section, value in found.items() if value != "none"
    )


def describe(config: Config, choice: Choice) -> str:
    """What computes attention, and why, for the line of a start and for `--dry-run`."""
    relative, chosen = _relative(config), f"{choice.name} ({choice.why})"
    if not relative:
        return chosen
    rest = f", the rest by {chosen}" if launch_types(config) else ""
    return f"by kernels of this program ({relative}){rest}"


def require_package(config: Config) -> None:
    """Raise ConfigError where the chosen implementation's package cannot be used; before torch is imported."""
    name = config.training.attention
    package = IMPLEMENTATIONS[name].package if name != "auto" else None
    problem = package and package.problem
    if package is not None and problem:
        raise ConfigError(
            f"training.attention is {name}, whose package {package.name} {problem}; {package.install}, or set "
            "training.attention to auto."
        )


def choose(config: Config, capability: Capability) -> Choice:
    """The implementation that `training.attention` chooses on a GPU.

    auto: fa3 on Hopper and fa4 on Blackwell where the package is installed and the settings fit; then fa2; then torch.

    Raises: ConfigError where the chosen one, or with auto each one, does not take the settings on this GPU.
    """
    name = config.training.attention
    if name != "auto":
        _require_fit(name, config, misfits(name, config, capability))
        return Choice(name, "as training.attention says")
    conflicts = _conflicts_of_rule(config)
    reasons: dict[str, list[str]] = {}
    for candidate in _candidates(capability):
        package, found = IMPLEMENTATIONS[candidate].package, misfits(candidate, config, capability)
        if package is not None and package.problem:
            found.append(f"the package {package.name} {package.problem}")
        reasons[candidate] = found
        if not found:
            break
    else:
        conflicts += [f"{candidate}: {', '.join(found)}" for candidate, found in reasons.items()]
        conflicts += [takes(candidate, config) for candidate in reasons if IMPLEMENTATIONS[candidate].is_here]
    if conflicts:
        raise ConfigError(
            "attention on a GPU of compute capability "
            f"{_shown(capability)} has no implementation for these settings ({'; '.join(conflicts)}); change them."
        )
    *others, chosen = reasons
    why = "; ".join(f"not {other}: {reasons[other][0]}" for other in others)
    return Choice(chosen, why or f"compute capability {_shown(capability)}")


def _conflicts_of_rule(config: Config) -> list[str]:
    """The settings that the kernels of this program do not take; with training.kernels torch there is no limit."""
    if config.training.kernels != "fused":
        return []
    return [
        f"{stack.what} is {stack.head_size} with {stack.section}.relative {stack.model.relative}, whose kernels take "
        f"heads up to {LARGEST_HEAD_OF_RULE} (or set training.kernels to torch)"
        for stack in _stacks(config)
        if stack.model.relative != "none" and stack.head_size > LARGEST_HEAD_OF_RULE
    ]


def _candidates(capability: Capability) -> Iterator[str]:
    """The implementations that `auto` tries on a GPU, the fastest first."""
    major, _ = capability
    # fa4 runs on Hopper too, where no rates of it are published.
    if major in (9, 10):
        yield "fa3" if major == 9 else "fa4"
    if capability >= AMPERE:
        yield "fa2"
    yield "torch"


def with_choice(config: Config, capability: Capability) -> Config:
    """The configuration with the implementation that `choose` names, for estimates of a GPU that need not be here.

    It stays as it is where kernels of this program compute attention. Raises: ConfigError, as `choose`.
    """
    name = choose(config, capability).name
    if _relative(config):
        return config
    return replace(config, training=replace(config.training, attention=name))
