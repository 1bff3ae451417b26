"""Let a trained model fill a word left out of its validation texts, and print its best completions next to the word.

    python -m scripts.quickstart.fill_examples RUN_DIRECTORY

Texts and words are the first of those that scripts/quickstart/scores.py scores, whose order is random; none is chosen.
The answers are the model's likeliest, with their probabilities; it finds their length itself. To fill blanks of your
own text use scripts/generate.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_directory
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from scripts.quickstart.words import WordBlank, add_arguments, open_loader, word_blanks

ANSWERS = 3
SHOWN = 34  # characters of the text on each side of the blank


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    generation = GenerationConfig(
        strategy="beam", num_beams=2 * ANSWERS, length_penalty=0.0, max_length=args.max_length
    )
    require_directory(args.run, "give a run directory")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.inference.filling import BlankFiller
    from megatron_lite.inference.open_run import load_run

    run = load_run(args.run)
    run.require_blank_infilling(["[MASK]"])
    loader, _ = open_loader(run, args)
    filler = BlankFiller(run.model, run.tokenizer.special, generation)
    blanks = word_blanks(loader, run.tokenizer, run.config.training.eval_samples)
    for blank in blanks[: args.count]:
        (answers,) = filler.ranked_spans([*blank.before, run.tokenizer.special.mask, *blank.after])
        print(render(run.tokenizer, blank, answers[:ANSWERS]))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--count", type=int, default=10, help="texts to show (default: 10)")
    parser.add_argument(
        "--max-length", type=int, default=16, help="most tokens of a completion (default: 16)"
    )
    args = parser.parse_args(arguments)
    if args.count < 1:
        raise ConfigError(f"--count is {args.count}; it must be at least 1.")
    return args


def render(tokenizer: Tokenizer, blank: WordBlank, answers: Sequence[tuple[float, list[int]]]) -> str:
    """The text around the blank, then the word and the completions; `=` marks the word among them."""
    from megatron_lite.inference.filling import span_text

    sides = (tokenizer.decode(side, skip_special=True) for side in (blank.before, blank.after))
    before, after = (" ".join(side.split()) for side in sides)
    shown = (
        f"{'=' if span == blank.word else ' '}{p:4.0%} {span_text(tokenizer, span)!r:16}"
        for p, span in answers
    )
    word = span_text(tokenizer, blank.word)
    return f"{before[-SHOWN:]:>{SHOWN}} ____ {after[:SHOWN]}\n    {word!r:18}{''.join(shown)}".rstrip()


if __name__ == "__main__":
    run_command(main)
