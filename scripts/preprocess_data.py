#!/usr/bin/env python3
"""Build a token dataset (.bin, .idx and manifest) from JSON lines, CSV, parquet, Arrow or text. See docs/data.md.

The same command continues a build that was stopped. With --mpi, ranks share the work:

    mpirun -n 4 python scripts/preprocess_data.py --mpi --input ...
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import signal
import sys
import traceback
from dataclasses import fields
from functools import cache, partial

import numpy as np

from data_utils.build.config import DEFAULT_SHARD_BYTES, BuildConfig, output_prefixes
from data_utils.build.corpus import build_corpus
from data_utils.build.ranks import Ranks
from data_utils.common.cores import usable_cores
from data_utils.common.errors import (
    INTERRUPTED_STATUS,
    ArgumentParser,
    ConfigError,
    ExitStatus,
    UserError,
    expanded_path,
    print_error,
    printable,
    run_command,
    system_error,
)
from data_utils.corpus.documents import add_reading_options
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.verification import verify
from data_utils.tokenizers.fast.encoders import ENCODERS
from data_utils.tokenizers.fast.package_encoders import require_package
from data_utils.tokenizers.special_tokens import ADDED_TOKENS, NO_TOKEN
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from data_utils.tokenizers.tokenizer_readers import KINDS
from data_utils.tokenizers.vocabulary import vocabulary_of
from data_utils.tokenizers.word_shares import unknown_share, word_shares

_TOKENS_READ = 2**16  # of the output, to say where words begin
INTERRUPTED = "interrupted before the output was complete; run the command again to continue"


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = (
        "files, globs, directories of parts, URLs (s3, gs, az, hf, https): .jsonl .csv .tsv .txt, also compressed; "
        ".parquet .arrow; save_to_disk"
    )
    add("--input", type=expanded_path, dest="inputs", nargs="+", required=True, help=text)
    text = "output prefix, for example data/corpus"
    add("--output", type=expanded_path, required=True, help=text)
    add("--tokenizer-kind", required=True, choices=KINDS)
    add(
        "--tokenizer-path",
        type=expanded_path,
        required=True,
        help="the tokenizer's file or directory, or org/name of the Hugging Face hub",
    )
    text = "tokens added after those of the files, as tokenizer.added_tokens of the run (default: glm)"
    add("--added-tokens", default="glm", choices=ADDED_TOKENS, help=text)
    add(
        "--vocab-size",
        type=int,
        help="as tokenizer.vocab_size of the run, if the vocabulary has ids without a token at its end",
    )
    text = "bert_wordpiece: keep case and accents"
    add("--no-lowercase", dest="lowercase", action="store_false", help=text)
    text = "sentencepiece: gMASK shares the id of eop, as in GLM-10B-Chinese"
    add("--shared-command-tokens", action="store_true", help=text)
    text = "hf_json: the token of a role, as tokenizer.roles of the run; repeatable"
    add("--token-role", type=token_role, action="append", default=[], metavar="ROLE=TOKEN", help=text)
    text = (
        "what encodes texts, with the same ids and so the same output: auto (the compiled encoder, else the "
        "tokenizer's library), or one that is refused where it cannot; gigatoken is a package (default: auto)"
    )
    add("--encoder", default="auto", choices=ENCODERS, help=text)
    add_reading_options(parser)
    add("--split", default="", help="NAME=FRACTION,...: several datasets, such as train=0.98,validation=0.02")
    add("--split-seed", type=int, default=0, help="seed of the split (default: 0)")
    add("--workers", type=int, default=usable_cores(), help="worker processes per rank (default: all cores)")
    add("--mpi", action="store_true", help="share the work with the other MPI ranks (mpirun, srun)")
    add(
        "--shard-megabytes",
        type=int,
        default=DEFAULT_SHARD_BYTES >> 20,
        help=f"megabytes of input per unit of work; does not change the output (default: {DEFAULT_SHARD_BYTES >> 20})",
    )
    add("--deduplicate", action="store_true", help="keep only the first of exactly equal texts")
    add(
        "--decontaminate",
        type=expanded_path,
        dest="evaluation_inputs",
        nargs="+",
        default=[],
        metavar="FILE",
        help=(
            "report documents that share sequences of 13 words with these evaluation texts (read with the same "
            "--text-key and --text-split)"
        ),
    )
    add(
        "--entities-key",
        help="field of JSON lines with the entities that a text mentions: [[start, end, name, score]]",
    )
    add(
        "--entity-ids",
        type=expanded_path,
        metavar="FILE",
        help="file with the entity ids: a line with their number, then lines of name, tab, id",
    )
    add("--min-score", type=float, default=0.0, help="skip mentions with a lower score (default: 0)")
    add(
        "--capitals",
        action="store_true",
        help="store which words begin with a capital letter (objective capitalization)",
    )
    text = "field of JSON lines with spans to mask as one unit: [[start, end, kind]] (spanbert, ernie)"
    add("--spans-key", help=text)
    text = (
        "build labelled pairs: field with the second text, --text-key being the first; the field `label` has the "
        "label (objective relevance)"
    )
    add("--second-key", help=text)
    add(
        "--labels", type=expanded_path, metavar="FILE", help="file with the names of the labels, one per line"
    )
    text = "build labelled pairs of sentences joined by a marker of this file, such as configs/labels/markers.txt"
    add("--markers", type=expanded_path, metavar="FILE", help=text)
    text = (
        "build text pairs (objective contrastive): a query, a text that belongs to it (positive), and texts that do "
        "not (negatives), of columns of JSON lines or tables"
    )
    add("--text-pairs", action="store_true", help=text)
    text = "column of the query; default: query, anchor, question or sentence1"
    add("--query-column", metavar="NAME", help=text)
    text = (
        "column of the positive, which may be that of the query (SimCSE); default: positive, positives, pos, document, "
        "answer or sentence2; a list makes several records"
    )
    add("--positive-column", metavar="NAME", help=text)
    add("--score-column", metavar="NAME", help="column of the score; default: score, if there is one")
    text = "columns of negatives, texts or lists; default: negative, negatives, neg, and negative_1, negative_2, ..."
    add("--negative-columns", nargs="+", default=[], metavar="NAME", help=text)
    text = "text before each query, as part of it, such as 'query: '"
    add("--query-prompt", default="", metavar="TEXT", help=text)
    add("--document-prompt", default="", metavar="TEXT", help="text before each other text")
    text = (
        "negatives of a record; of one with more the last are left out (default: as the first records have)"
    )
    add("--negatives", type=int, metavar="H", help=text)
    add("--overwrite", action="store_true", help="replace existing output")
    add("--restart", action="store_true", help="discard the shards of a stopped build")
    add("--verify", action="store_true", help="read and check the whole output afterwards")
    return parser.parse_args()


def token_role(text: str) -> tuple[str, str]:
    role, equals, token = text.partition("=")
    if not equals or not token:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=TOKEN, for example 'eos=<|im_end|>'")
    return role, token


def make_config(arguments: argparse.Namespace) -> BuildConfig:
    for option in ("workers", "shard_megabytes"):
        if (value := getattr(arguments, option)) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}; it must be 1 or more.")
    values = {field.name: getattr(arguments, field.name, None) for field in fields(BuildConfig)}
    return BuildConfig(**{**values, "shard_bytes": arguments.shard_megabytes << 20})


def check_encoder(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a named encoder whose package is missing, or that the build would not use."""
    if arguments.encoder in ("auto", "library"):
        return
    for option in ("entities_key", "capitals", "spans_key"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--encoder {arguments.encoder} is given with --{option.replace('_', '-')}, which needs the characters "
                "of each token, and only the tokenizer's library tells them; leave --encoder out."
            )
    require_package(arguments.encoder)


def make_dataset(arguments: argparse.Namespace, ranks: Ranks) -> None:
    ranks.on_each(lambda: check_encoder(arguments))  # on each: one node may lack the package
    tokenizer = TokenizerConfig(
        kind=arguments.tokenizer_kind,
        path=arguments.tokenizer_path,
        added_tokens=arguments.added_tokens,
        vocab_size=arguments.vocab_size,
        lowercase=arguments.lowercase,
        fixed_command_tokens=not arguments.shared_command_tokens,
        roles=dict(arguments.token_role),
    )
    make_tokenizer = cache(partial(load_tokenizer, tokenizer, arguments.encoder))
    config = make_config(arguments)
    report = build_corpus(config, make_tokenizer, ranks)
    if ranks.rank != 0:
        return
    if report is None:
        print(
            f"{config.output} is complete: what built it was killed when it had only its working files to remove"
        )
    else:
        print("\n".join(map(printable, report.lines())))
        text = np.array(IndexedDataset(next(iter(report.documents))).tokens[:_TOKENS_READ])
        vocabulary, whose = vocabulary_of(make_tokenizer()), f"the first {len(text):,}"
        for line in word_shares(text, vocabulary, whose):
            print(f"  {line}")
        for line in unknown_share(text, vocabulary, whose):
            print(line)
        if vocabulary.special.eos == NO_TOKEN:
            remedy = "; if one of its tokens does, --token-role eos=TOKEN" * (tokenizer.kind == "hf_json")
            print(f"  no token ends the documents: the tokenizer has none with a known name{remedy}")
    for prefix in output_prefixes(config) if arguments.verify else ():
        verify(IndexedDataset(prefix, sequential=True))
        print(f"  {prefix}: verified")


def main() -> int:
    arguments = parse_arguments()
    if arguments.mpi:
        return main_of_rank(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        make_dataset(arguments, Ranks())
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return INTERRUPTED_STATUS
    return 0


def main_of_rank(arguments: argparse.Namespace) -> int:
    """Every rank ends with the same status; the error is printed once, by rank 0."""
    from mpi4py import MPI

    try:
        make_dataset(arguments, Ranks(MPI.COMM_WORLD))
    except UserError as error:
        if MPI.COMM_WORLD.Get_rank() == 0:
            print_error(error)
        return ExitStatus.USER_ERROR
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        MPI.COMM_WORLD.Abort(INTERRUPTED_STATUS)
    except BaseException as error:  # the other ranks would wait for this one
        print_error(system_error(error)) if isinstance(error, OSError) else traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
    return 0


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
