"""Read files of minimal pairs before the hours of training at whose end they are scored.

python -m scripts.laptop.check_pairs PATH
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data_utils.common.errors import ArgumentParser, run_command
from data_utils.tasks.readers.minimal_pairs import read_minimal_pairs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="BLiMP's file or directory")
    pairs = read_minimal_pairs(parser.parse_args(arguments).path)
    print(f"{len(pairs):,} pairs in {len({pair.paradigm for pair in pairs})} paradigms")
    return 0


if __name__ == "__main__":
    run_command(main)
