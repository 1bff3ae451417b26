"""The check of a new run's options against the class of transformers that its published system has."""

from __future__ import annotations

from data_utils.common.settings import check
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import FIXED


def require_class(model: ModelConfig) -> None:
    """Raise ConfigError for a new run with an option that its system's class of transformers does not have."""
    for name, value in FIXED.get(model.system or "", {}).items():
        check(
            getattr(model, name) == value,
            f"model.{name} is {getattr(model, name)} with model.system {model.system}, whose class computes "
            f"{value} in its head, so that no export could be used; set it to {value}, or choose another system.",
        )
