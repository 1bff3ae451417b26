"""A program that builds a corpus, for tests that kill it: build_driver.py OPTIONS TOKENIZER [mpi]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.build.ranks import Ranks
from data_utils.common.errors import UserError, run_command
from support.data import byte_tokenizer


def main() -> int:
    ranks = Ranks()
    if "mpi" in sys.argv[3:]:
        from mpi4py import MPI

        ranks = Ranks(MPI.COMM_WORLD)
    tokenizer = getattr(byte_tokenizer, sys.argv[2])
    try:
        build_corpus(BuildConfig(**json.loads(sys.argv[1])), tokenizer, ranks)
    except UserError as error:
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
