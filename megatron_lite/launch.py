"""What the launcher told this process. Imports no torch, so that a world that does not fit is refused at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_lite.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """What the launcher (deepspeed, torchrun, or none) told this process."""

    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def from_environment(local_rank: int | None = None) -> Launch:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; a process started by hand is rank 0 of 1.

        Args:
            local_rank: the value of the launcher's --local_rank argument, used when the variable is absent.
        """
        values = {}
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", local_rank or 0)):
            text = os.environ.get(name, str(default))
            if not text.isdigit():
                raise ConfigError(
                    f"environment variable {name} is {text!r}; it must be a whole number. Start through "
                    f"deepspeed or torchrun, or unset it."
                )
            values[name] = int(text)
        return Launch(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"])
