"""Heartbeats: small files below the run's directory in which each rank's watchdog writes where the rank is.

All ranks pass the same points of the program in the same order, and each counts the points that it has passed. So the
others wait for the rank with the lowest count. `scripts/report.py RUN_DIRECTORY --heartbeats` prints them.
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

_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is."""

    rank: int
    host: str
    pid: int
    section: str
    place: str
    step: int
    passed: int  # points passed since the start
    seconds: float  # in the section
    time: float  # of writing, Unix

    def __str__(self) -> str:
        where = f"{self.section}, step {self.step}"
        return f"rank {self.rank} on {self.host} ({where}{', ' if self.place else ''}{self.place})"

    @property
    def with_age(self) -> str:
        """Rank and point, with the age of the heartbeat: the rank may have gone on since."""
        return f"{self}, last heartbeat {max(0.0, time.time() - self.time):.0f} s ago"

    def write(self, directory: Path) -> None:
        """Replace the rank's file as a whole. Raises OSError."""
        path = directory / f"rank_{self.rank:05d}.json"
        temporary = path.with_suffix(".tmp")
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @property
    def process_has_died(self) -> bool:
        """Whether the process ran on this machine and has ended; a zombie, whose status is not read yet, has too."""
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
            beat = conform_to(parse_json(read_bounded(path, _MAX_FILE_BYTES)), Heartbeat)
            # Control characters of terminals are escaped: whoever can write into the directory can write anything.
            host, section, place = (
                one_line(text) if text else "" for text in (beat.host, beat.section, beat.place)
            )
            heartbeats.append(replace(beat, host=host, section=section, place=place))
    return sorted((beat for beat in heartbeats if beat.time >= earliest), key=lambda beat: beat.rank)


def who_is_behind(heartbeats: list[Heartbeat], world_size: int) -> str:
    """One line: the ranks that have passed the fewest points, for which the others wait."""
    # Files of higher ranks are left by an earlier start with more processes.
    current = [beat for beat in heartbeats if beat.rank < world_size]
    silent = sorted(set(range(world_size)) - {beat.rank for beat in current})
    if silent:
        return f"no heartbeat from {len(silent)} of {world_size} ranks, first {silent[:8]}"
    least = min(beat.passed for beat in current)
    behind = [beat for beat in current if beat.passed == least]
    if len(behind) == world_size:
        return f"all {world_size} ranks are at the same point"
    waiting = world_size - len(behind)
    return f"{waiting} of {world_size} ranks wait for {'; '.join(str(beat) for beat in behind[:8])}"
