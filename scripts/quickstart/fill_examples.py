"""Let a trained model fill blanks of its validation text, and print its words beside the original ones.

    python -m scripts.quickstart.fill_examples --checkpoint RUN_DIRECTORY

Texts and blanks are those of the validation samples with the token objective. To fill blanks of your own
text use scripts/generate.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_utils.base.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.base.files import require_directory
from data_utils.objectives.blank_infilling import TOKEN
from data_utils.objectives.planes import Example
from data_utils.samples.loader import SampleLoader, open_datasets
from data_utils.text.special_tokens import SpecialTokens
from data_utils.text.tokenizers import Tokenizer
from megatron_lite.generate.config import GenerationConfig

MOST_BLANKS = 8
MOST_TOKENS = 150  # of a text, so that it stays readable


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    generation = GenerationConfig(max_length=args.max_length)
    require_directory(args.checkpoint, "give a run directory or one of its checkpoints")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.generate.filling import BlankFiller
    from megatron_lite.generate.open_run import load_run

    run = load_run(args.checkpoint)
    config, tokenizer = run.config, run.tokenizer
    data = open_datasets(config.data, config.objective_choices, tokenizer, config.training.seed)
    if data.validation is None:
        raise ConfigError("the run has no validation corpus; set data.validation.")
    filler = BlankFiller(run.model, tokenizer.special, generation)
    shown = 0
    for example in readable_examples(data.validation, config.training.eval_samples):
        context = example.tokens[example.ord == 0].tolist()
        originals = spans_of(example, tokenizer.special)
        print(f"--- {shown + 1} ---")
        print(render(tokenizer, context, originals, filler.fill(context)))
        shown += 1
        if shown == args.count:
            return
    if not shown:
        raise DataError(
            f"no validation sample has 1 to {MOST_BLANKS} short blanks; raise blank_infilling.token_prob."
        )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, type=Path, help="run directory or one step_... of it")
    parser.add_argument("--count", type=int, default=3, help="texts to show (default: 3)")
    parser.add_argument("--max-length", type=int, default=16, help="most tokens per blank (default: 16)")
    args = parser.parse_args(arguments)
    if args.count < 1:
        raise ConfigError(f"--count is {args.count}; it must be at least 1.")
    return args


def readable_examples(loader: SampleLoader, num_samples: int) -> Iterator[Example]:
    """The documents of the token objective that are short enough to read, in sample order."""
    for index in range(num_samples):
        for example in Example.from_planes(loader.batch(np.array([index]))[0]).documents():
            blanks = len(np.unique(example.position_ids[example.ord > 0]))
            is_short = 1 <= blanks <= MOST_BLANKS and len(example.tokens) <= MOST_TOKENS
            if example.objective[0] == TOKEN and is_short:
                yield example


def spans_of(example: Example, special: SpecialTokens) -> list[list[int]]:
    """The original spans in text order: part B carries the position of its mask and ends with eop."""
    in_part_b = example.ord > 0
    positions, targets = example.position_ids[in_part_b], example.targets[in_part_b]
    spans = [targets[positions == position].tolist() for position in np.unique(positions)]
    return [[token for token in span if token not in (special.eop, special.eos)] for span in spans]


def render(
    tokenizer: Tokenizer, context: list[int], originals: Sequence[list[int]], fillings: Sequence[list[int]]
) -> str:
    """The text with numbered blanks, then a line for each blank."""
    from megatron_lite.generate.filling import insert_spans

    hidden = {tokenizer.special.cls, tokenizer.special.eos}
    parts = insert_spans([token for token in context if token not in hidden], originals, tokenizer.special)
    texts = [tokenizer.decode(part) for part in parts]
    for number, i in enumerate(range(1, len(texts), 2), start=1):
        space = " " if texts[i].startswith(" ") else ""  # byte-level tokens carry the space before a word
        texts[i] = f"{space}___{number}___"
    lines = [" ".join("".join(texts).split())]
    for number, (original, filling) in enumerate(zip(originals, fillings, strict=True), start=1):
        words = [repr(tokenizer.decode(span).strip()) for span in (original, filling)]
        lines.append(f"  {number}  original {words[0]:28} model {words[1]}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
