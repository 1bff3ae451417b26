"""Let a trained model fill blanks of its validation text, and print its best answers beside the original words.

    python -m scripts.quickstart.fill_examples --checkpoint RUN_DIRECTORY

Texts and blanks are those of the first validation samples with the token objective, whose order is random; none is
chosen. The answers are the model's likeliest, with their probabilities. To fill blanks of your own text use
scripts/generate.py.
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
from data_utils.text.tokenizers import Tokenizer
from megatron_lite.generate.config import GenerationConfig
from scripts.quickstart.scores import spans_of

ANSWERS = 3
MOST_BLANKS = 8
MOST_TOKENS = 120  # of a text, so that it stays readable


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    generation = GenerationConfig(
        strategy="beam", num_beams=ANSWERS, length_penalty=0.0, max_length=args.max_length
    )
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
        print(render(tokenizer, context, originals, filler.answers(context)))
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
    parser.add_argument("--count", type=int, default=4, help="texts to show (default: 4)")
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


def render(
    tokenizer: Tokenizer,
    context: list[int],
    originals: Sequence[list[int]],
    answers: Sequence[list[tuple[float, list[int]]]],
) -> str:
    """The text with numbered blanks, then for each its original words and the answers; `=` marks the original."""
    from megatron_lite.generate.filling import insert_spans

    hidden = {tokenizer.special.cls, tokenizer.special.eos}
    parts = insert_spans([token for token in context if token not in hidden], originals, tokenizer.special)
    texts = [tokenizer.decode(part) for part in parts]
    for number, i in enumerate(range(1, len(texts), 2), start=1):
        space = " " if texts[i].startswith(" ") else ""  # byte-level tokens carry the space before a word
        texts[i] = f"{space}___{number}___"
    lines = [" ".join("".join(texts).split())]
    for number, (original, best) in enumerate(zip(originals, answers, strict=True), start=1):
        shown = (
            f"{'=' if span == original else ' '} {p:4.0%} {tokenizer.decode(span).strip()!r:18}"
            for p, span in best
        )
        lines.append(f"  {number}  {tokenizer.decode(original).strip()!r:24} {' '.join(shown)}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
