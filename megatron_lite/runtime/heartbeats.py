"""Heartbeats: small files below the run's directory in which each rank's watchdog writes where the rank is.

All ranks pass the same places in the same order, and each counts the places it has passed. So the rank with the lowest
count is the one that the others wait for. `scripts/report.py RUN_DIRECTORY --heartbeats` prints them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data_utils.common.setting_files import one_line
from data_utils.common.untrusted import conform_to, parse_json, read_bounded

_MAX_BYTES = 1 << 16  # of a file


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is."""

    rank: int
    host: str
    pid: int
    section: str
    place: str
    step: int
    passed: int  # places passed since the start
    seconds: float  # in the section
    time: float  # of writing, Unix

    def __str__(self) -> str:
        where = f"{self.section}, step {self.step}"
        return f"rank {self.rank} on {self.host} ({where}{', ' if self.place else ''}{self.place})"

    @property
    def noted(self) -> str:
        """Who and where, with the age of this knowledge: a rank may have gone on since."""
        return f"{self}, noted {max(0.0, time.time() - self.time):.0f} s ago"

    def write(self, directory: Path) -> None:
        """Replace the rank's file as a whole. Raises OSError."""
        path = directory / f"rank_{self.rank:05d}.json"
        temporary = path.with_suffix(".tmp")
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @property
    def is_of_a_dead_process(self) -> bool:
        """Whether the process ran on this machine and has ended, also where its parent has not taken its status yet."""
        if self.host != socket.gethostname():
            return False
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return status.rpartition(")")[2].split()[:1] in (["Z"], ["X"])


def heartbeat_directory(run_directory: Path) -> Path:
    return run_directory / "heartbeats"


def read_heartbeats(directory: Path, earliest: float = 0.0) -> list[Heartbeat]:
    """The last heartbeat of each rank, by rank, without unreadable ones and those before `earliest` (Unix seconds)."""
    heartbeats = []
    for path in directory.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            beat = conform_to(parse_json(read_bounded(path, _MAX_BYTES)), Heartbeat)
            # What a terminal would take for a command is escaped: who may write into the directory may write anything.
            host, section, place = (
                one_line(text) if text else "" for text in (beat.host, beat.section, beat.place)
            )
            heartbeats.append(replace(beat, host=host, section=section, place=place))
    return sorted((beat for beat in heartbeats if beat.time >= earliest), key=lambda beat: beat.rank)


def who_is_behind(heartbeats: list[Heartbeat], world_size: int) -> str:
    """One line: the ranks that have passed the fewest places, for whom the others wait."""
    ours = [beat for beat in heartbeats if beat.rank < world_size]
    silent = sorted(set(range(world_size)) - {beat.rank for beat in ours})
    if silent:
        return f"no heartbeat of {len(silent)} of {world_size} ranks, the first of them {silent[:8]}"
    least = min(beat.passed for beat in ours)
    behind = [beat for beat in ours if beat.passed == least]
    if len(behind) == world_size:
        return f"all {world_size} ranks are at the same point"
    named = "; ".join(str(beat) for beat in behind[:8])
    return f"furthest behind, so that the other {world_size - len(behind)} wait: {named}"
