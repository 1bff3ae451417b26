"""The implementations of attention on a GPU: what each takes, and which one `training.attention` chooses.

Needs no torch, so that settings are refused before it is imported.

fa2 (FlashAttention 2) and torch (the memory-efficient kernel) are in torch. fa3 and fa4 are packages, which a switch of
torch puts in place of fa2. Sources of the limits: torch.nn.attention._fa3 and _fa4 of torch 2.13, and of the packages
flash_api.cpp of hopper and flash_attn.cute.interface of August 2026.

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


@dataclass(frozen=True)
class Package:
    """Where an implementation comes from that is not part of torch."""

    name: str
    install: str
    versions: tuple[str, str] | None = (
        None  # the first and the last that torch 2.13 calls correctly; None = any
    )

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
    largest_head: int = 256  # features; a multiple of 8
    largest_deterministic_head: int = 256
    package: Package | None = None

    @property
    def is_here(self) -> bool:
        """Whether this machine has it, whatever its GPU."""
        return self.package is None or self.package.problem is None


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
        "Ampere and later (compute capability 8.0)", lambda capability: capability[0] >= 8, has_dropout=True
    ),
    "torch": Implementation(
        "any", lambda capability: True, ("bf16", "fp16", "fp32"), has_dropout=True, has_window=False
    ),
}
CHOICES = ("auto", *sorted(IMPLEMENTATIONS))


@dataclass(frozen=True)
class Choice:
    """The implementation of a run on a GPU."""

    name: str
    why: str


def _models(config: Config) -> Iterator[tuple[str, Any]]:
    """The sections that describe a stack of blocks."""
    yield "model", config.model
    if config.decoder is not None:
        yield "decoder", config.decoder


def misfits(name: str, config: Config) -> list[str]:
    """The settings that an implementation does not take, with their values; empty = it takes all of them."""
    implementation, training = IMPLEMENTATIONS[name], config.training
    found = []
    if training.precision not in implementation.precisions:
        found.append(f"training.precision is {training.precision}")
    largest = implementation.largest_head
    if training.deterministic:
        largest = implementation.largest_deterministic_head
    for section, model in _models(config):
        if model.attention_dropout and not implementation.has_dropout:
            found.append(f"{section}.attention_dropout is {model.attention_dropout:g}")
        if model.attention_window and not implementation.has_window:
            found.append(f"{section}.attention_window is {model.attention_window}")
        if model.head_size % 8 or model.head_size > largest:
            found.append(f"{section}.hidden_size over num_attention_heads is {model.head_size}")
    return found


def takes(name: str, config: Config) -> str:
    """In words: the settings with which an implementation runs."""
    implementation = IMPLEMENTATIONS[name]
    largest = implementation.largest_head
    if config.training.deterministic:
        largest = implementation.largest_deterministic_head
    limits = [f"training.precision {' or '.join(implementation.precisions)}"]
    limits += ["attention_dropout 0"] * (not implementation.has_dropout)
    limits += ["attention_window 0"] * (not implementation.has_window)
    return f"{', '.join(limits)}, heads of a multiple of 8 up to {largest}"


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
    found = misfits(name, config)
    if found:
        raise ConfigError(
            f"training.attention is {name}, but {', '.join(found)}; {name} takes {takes(name, config)}: change these, "
            "or set training.attention to auto."
        )


def _relative(config: Config) -> str:
    """The settings with which attention is a kernel of this program, with their values; "" = none."""
    models = [(section, model) for section, model in _models(config) if model.relative != "none"]
    return " and ".join(f"{section}.relative is {model.relative}" for section, model in models)


def describe(config: Config, choice: Choice) -> str:
    """What computes attention, and why, for the line of a start and for `--dry-run`."""
    relative = _relative(config)
    return f"by kernels of this program ({relative})" if relative else f"{choice.name} ({choice.why})"


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

    auto: fa3 on Hopper and fa4 on Blackwell where the package is installed and the settings fit; then fa2; torch for
    fp32 and for GPUs before Ampere.

    Raises: ConfigError where the chosen one does not run on this GPU.
    """
    name, gpu = config.training.attention, ".".join(map(str, capability))
    if name != "auto":
        if not IMPLEMENTATIONS[name].runs_on(capability):
            raise ConfigError(
                f"training.attention is {name}, which runs on {IMPLEMENTATIONS[name].gpus}, but this GPU has compute "
                f"capability {gpu}; set training.attention to auto."
            )
        return Choice(name, "as training.attention says")
    reasons: list[str] = []
    for candidate in _candidates(capability):
        package, found = IMPLEMENTATIONS[candidate].package, misfits(candidate, config)
        if package is not None and package.problem:
            found.append(f"the package {package.name} {package.problem}")
        if not found:
            return Choice(candidate, "; ".join(reasons) or f"compute capability {gpu}")
        reasons.append(f"not {candidate}: {found[0]}")
    return Choice("torch", "; ".join(reasons) or f"compute capability {gpu}")


def _candidates(capability: Capability) -> Iterator[str]:
    """The implementations that `auto` tries on a GPU, the fastest first."""
    major, _ = capability
    # fa4 runs on Hopper too, where no rates of it are published.
    if major in (9, 10):
        yield "fa3" if major == 9 else "fa4"
    if major >= 8:
        yield "fa2"


def with_choice(config: Config, capability: Capability) -> Config:
    """The configuration with the implementation that `choose` names, for estimates of a GPU that need not be here.

    It stays as it is where no implementation runs its attention, or takes its settings.
    """
    name = choose(config, capability).name
    if _relative(config) or misfits(name, config):
        return config
    return replace(config, training=replace(config.training, attention=name))
