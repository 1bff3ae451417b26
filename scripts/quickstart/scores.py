"""Score how a run fills whole words of its validation text, compared with n-gram models of its training text.

    python -m scripts.quickstart.scores RUN_DIRECTORY

Each text has one blank. All models are told how many tokens the word has, and none may end the blank earlier (eop).

  token accuracy   the share of the words' tokens that are the likeliest, given the word's tokens before it
  nats per token   of the same tokens
  exact match      the share of words that the model writes as they were
  exact match, free length   the same where the model finds the length by itself, which n-grams cannot

The 5-gram model sees the text to the left (5-gram left) or on both sides (5-gram both): it chooses among whole words by
the text that follows them, and among tokens where one is missing. Writes RUN_DIRECTORY/scores.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from data_utils.common.batch_fields import FIELDS
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_directory, write_whole
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.config.generation import GenerationConfig
from scripts.quickstart.ngram import ORDER, NGram
from scripts.quickstart.words import LONGEST, WordBlank, add_arguments, open_loader, word_blanks

FIGURES = {
    "token accuracy": "{:.1%}",
    "nats per token": "{:.2f}",
    "exact match": "{:.1%}",
    "exact match, free length": "{:.1%}",
}
Scores = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    require_directory(args.run, "give the directory of a run that has begun")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.inference.filling import BlankFiller
    from megatron_lite.inference.open_run import load_run

    run = load_run(args.run)
    run.require_blank_infilling(["[MASK]"])
    require_countable(run.tokenizer.vocab_size)
    loader, data = open_loader(run, args)
    blanks = word_blanks(loader, run.tokenizer, args.samples)
    tokens = np.concatenate([IndexedDataset(corpus.prefix).tokens[:] for corpus in data.train])
    counted = {order: NGram(tokens, run.tokenizer.vocab_size, order) for order in (1, ORDER)}
    special = run.tokenizer.special

    def fill(shortest: int, longest: int, some: Sequence[WordBlank]) -> list[list[int]]:
        # max_length counts the end of the blank.
        filler = BlankFiller(
            run.model, special, GenerationConfig(min_length=shortest, max_length=longest + 1)
        )
        return [
            spans[0][:longest]
            for spans in filler.fill_all([[*b.before, special.mask, *b.after] for b in some])
        ]

    scores = {
        "unigram": ngram_scores(counted[1], blanks, sees_right=False),
        "5-gram left": ngram_scores(counted[ORDER], blanks, sees_right=False),
        "5-gram both": ngram_scores(counted[ORDER], blanks, sees_right=True),
        "model": token_scores(model_log_probabilities(run.model, blanks, special))
        | {
            "exact match": exact_match(blanks, told_lengths(blanks, fill)),
            "exact match, free length": exact_match(blanks, fill(0, 4 * LONGEST, blanks)),
        },
    }
    write_whole(args.run / "scores.json", (json.dumps(scores, indent=1) + "\n").encode(), "RUN_DIRECTORY")
    print(table(scores, blanks))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=400, help="validation samples to read (default: 400)")
    args = parser.parse_args(arguments)
    if args.samples < 1:
        raise ConfigError(f"--samples is {args.samples}; it must be at least 1.")
    return args


def require_countable(vocab_size: int) -> None:
    """Raise ConfigError if five tokens do not fit into the number that the 5-gram model counts."""
    if vocab_size**ORDER >= 2**63:
        most = int(2 ** (63 / ORDER))
        raise ConfigError(
            f"the tokenizer has {vocab_size:,} tokens; the {ORDER}-gram model counts at most {most:,}. "
            "Score a run with a smaller vocabulary."
        )


def token_scores(predicted: Iterable[tuple[int, np.ndarray]]) -> Scores:
    """Args: predicted: target and log probabilities [vocabulary], for each token of the blanks."""
    right, nats = [], []
    for target, log_p in predicted:
        right.append(int(log_p.argmax()) == target)
        nats.append(-float(log_p[target]))
    return {"token accuracy": float(np.mean(right)), "nats per token": float(np.mean(nats))}


def exact_match(blanks: Sequence[WordBlank], words: Sequence[list[int]]) -> float:
    """The share of blanks whose word is written as it was."""
    return float(np.mean([blank.word == word for blank, word in zip(blanks, words, strict=True)]))


def told_lengths(
    blanks: Sequence[WordBlank], fill: Callable[[int, int, Sequence[WordBlank]], list[list[int]]]
) -> list[list[int]]:
    """The word of each blank as `fill` writes it with exactly the word's number of tokens."""
    words: dict[int, list[int]] = {}
    for length in sorted({len(blank.word) for blank in blanks}):
        places = [place for place, blank in enumerate(blanks) if len(blank.word) == length]
        words |= dict(zip(places, fill(length, length, [blanks[place] for place in places]), strict=True))
    return [words[place] for place in range(len(blanks))]


def ngram_scores(model: NGram, blanks: Sequence[WordBlank], *, sees_right: bool) -> Scores:
    def predicted() -> Iterator[tuple[int, np.ndarray]]:
        for blank in blanks:
            for i, target in enumerate(blank.word):
                before, is_last = [*blank.before, *blank.word[:i]], i == len(blank.word) - 1
                p = (
                    model.between(before, blank.after)
                    if sees_right and is_last
                    else model.probabilities(before)
                )
                yield target, np.log(p)

    words = [model.filled(b.before, len(b.word), b.after if sees_right else ()) for b in blanks]
    return token_scores(predicted()) | {"exact match": exact_match(blanks, words)}


def model_log_probabilities(  # type: ignore[no-untyped-def]
    model, blanks: Sequence[WordBlank], special: SpecialTokens
) -> Iterator[tuple[int, np.ndarray]]:
    """(target id, log probabilities [V] without eop) of each token of the blanks, a forward pass for each blank."""
    import torch

    from megatron_lite.transformer.batch import Batch
    from megatron_lite.transformer.micro_batch import prepare

    device, vocab_size = next(model.parameters()).device, model.config.vocab_size
    longest = max(len(blank.before) + len(blank.word) + len(blank.after) for blank in blanks)
    rows = BlankInfilling(BlankInfillingConfig(), Vocabulary(special, vocab_size), 0, longest)
    for blank in blanks:
        text = np.array([*blank.before[1:], *blank.word, *blank.after])
        begin = len(blank.before) - 1
        example = rows.build(text, [(begin, begin + len(blank.word))], [0])
        fields = np.stack([getattr(example, name).view(np.int32) for name in FIELDS])
        host = prepare(Batch(fields[None]), device, model.config)
        is_wanted = (example.ord > 0) & (example.targets != special.eop)
        order = host.plan.order
        wanted = np.flatnonzero((order >= 0) & is_wanted[order])
        inputs = host.to(device)
        with torch.no_grad():
            hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)[torch.from_numpy(wanted)]
            logits = model.logits(hidden).float()
            logits[:, special.eop] = -torch.inf
            log_p = logits.log_softmax(-1).cpu().numpy()
        yield from zip(example.targets[order[wanted]].tolist(), log_p, strict=True)


def table(scores: dict[str, Scores], blanks: Sequence[WordBlank]) -> str:
    """The models side by side."""
    tokens = sum(len(blank.word) for blank in blanks)
    lines = [
        f"{len(blanks):,} words of as many validation texts, {tokens:,} tokens; every model knows their number",
        f"{'':26}" + "".join(f"{name:>13}" for name in scores),
    ]
    for figure, pattern in FIGURES.items():
        shown = (pattern.format(of[figure]) if figure in of else "" for of in scores.values())
        lines.append(f"{figure:26}" + "".join(f"{text:>13}" for text in shown))
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
