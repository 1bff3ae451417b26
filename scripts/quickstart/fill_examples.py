"""Let a trained model fill blanks of its validation text, and print its best answers beside the original words.

    python -m scripts.quickstart.fill_examples --checkpoint RUN_DIRECTORY

Texts and blanks are those of the first validation samples with the token objective, whose order is random; none is
chosen. The answers are the model's likeliest, with their probabilities. To fill blanks of your own text use
scripts/generate.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from data_utils.base.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.base.files import require_directory
from data_utils.samples.blanks import Prompt, prompts
from data_utils.samples.loader import open_datasets
from data_utils.text.tokenizers import Tokenizer
from megatron_lite.config.generation import GenerationConfig

ANSWERS = 3


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
    found = prompts(data.validation, config.training.eval_samples, tokenizer.special)
    shown = list(itertools.islice(found, args.count))
    if not shown:
        raise DataError("no validation sample has short blanks; raise blank_infilling.token_prob.")
    for number, prompt in enumerate(shown, start=1):
        print(f"--- {number} ---")
        print(render(tokenizer, prompt, filler.answers(prompt.context)))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, type=Path, help="run directory or one step_... of it")
    parser.add_argument("--count", type=int, default=4, help="texts to show (default: 4)")
    parser.add_argument("--max-length", type=int, default=16, help="most tokens per blank (default: 16)")
    args = parser.parse_args(arguments)
    if args.count < 1:
        raise ConfigError(f"--count is {args.count}; it must be at least 1.")
    return args


def render(tokenizer: Tokenizer, prompt: Prompt, answers: Sequence[list[tuple[float, list[int]]]]) -> str:
    """The text with numbered blanks, then for each its original words and the answers; `=` marks the original."""
    from megatron_lite.generate.filling import numbered_text, span_text

    lines = [numbered_text(tokenizer, prompt.context, prompt.originals)]
    for number, (original, best) in enumerate(zip(prompt.originals, answers, strict=True), start=1):
        shown = (
            f"{'=' if span == original else ' '} {p:4.0%} {span_text(tokenizer, span)!r:18}"
            for p, span in best
        )
        lines.append(f"  {number}  {span_text(tokenizer, original)!r:24} {' '.join(shown)}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
