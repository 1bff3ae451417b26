"""Score how a run fills the blanks of its validation text, beside a unigram and a 5-gram model of its training text.

    python -m scripts.quickstart.scores RUN_DIRECTORY

Blanks are those of the validation samples with the token objective.

  token accuracy   the share of a blank's tokens that are the likeliest, given the tokens of the blank before it
  nats per token   of the same tokens
  exact match      the share of blanks of up to SHORT tokens whose greedy filling is the original, where the model also
                   has to find the length, which the baselines are told

The baselines see the text to the left, the model both sides. Where a blank ends (eop) counts for none of them. Writes
RUN_DIRECTORY/scores.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_utils.base.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.base.files import require_directory, write_whole
from data_utils.base.planes import FIELDS, Example
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.samples.blanks import blanked_examples, spans_of
from data_utils.samples.loader import open_datasets
from data_utils.text.special_tokens import SpecialTokens
from megatron_lite.config.generation import GenerationConfig
from scripts.quickstart.ngram import ORDER, NGram

SHORT = 3  # tokens
MODELS = ("unigram", "5-gram", "model")
FIGURES = {"token accuracy": "{:.1%}", "nats per token": "{:.2f}", "exact match": "{:.1%}"}


@dataclass(frozen=True)
class Blank:
    before: list[int]  # the text to its left, other blanks filled
    original: list[int]


@dataclass(frozen=True)
class Text:
    """A document of a validation sample with the token objective."""

    example: Example
    context: list[int]  # part A
    blanks: list[Blank]


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    require_directory(args.run, "give the directory of a run that has begun")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.generate.filling import BlankFiller
    from megatron_lite.generate.open_run import load_run

    run = load_run(args.run)
    config, special = run.config, run.tokenizer.special
    require_countable(run.tokenizer.vocab_size)
    data = open_datasets(config.data, config.objective_choices, run.tokenizer, config.training.seed)
    if data.validation is None:
        raise ConfigError("the run has no validation corpus; set data.validation.")
    texts = [text_of(example, special) for example in blanked_examples(data.validation, args.samples)]
    if not texts:
        raise DataError("no validation sample has the token objective; raise blank_infilling.token_prob.")
    tokens = [IndexedDataset(corpus.prefix).tokens[:] for corpus in config.data.train]
    filler = BlankFiller(run.model, special, GenerationConfig(max_length=4 * SHORT))
    scores = {
        name: ngram_scores(NGram(np.concatenate(tokens), run.tokenizer.vocab_size, order), texts)
        for name, order in zip(MODELS, (1, ORDER), strict=False)
    }
    scores["model"] = token_scores(texts, lambda text: model_log_probabilities(run.model, text, special))
    scores["model"]["exact match"] = exact_match(texts, lambda text: filler.fill(text.context))
    write_whole(args.run / "scores.json", (json.dumps(scores, indent=1) + "\n").encode(), "RUN_DIRECTORY")
    print(table(scores, texts))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="a run of pretrain_glm.py")
    parser.add_argument("--samples", type=int, default=150, help="validation samples to read (default: 150)")
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


def text_of(example: Example, special: SpecialTokens) -> Text:
    """The blanks of an Example of the token objective, in text order."""
    context = example.tokens[example.ord == 0].tolist()
    before: list[int] = []
    blanks: list[Blank] = []
    spans = iter(spans_of(example, special))
    for token in context:
        if token == special.mask:
            blanks.append(Blank(list(before), next(spans)))
            before += blanks[-1].original
        else:
            before.append(token)
    return Text(example, context, blanks)


def token_scores(
    texts: Sequence[Text], log_probabilities: Callable[[Text], Iterator[tuple[int, np.ndarray]]]
) -> dict[str, float]:
    """Args: log_probabilities: target and log probabilities [vocabulary], for each token of a text's blanks."""
    right, nats = [], []
    for text in texts:
        for target, log_p in log_probabilities(text):
            right.append(int(log_p.argmax()) == target)
            nats.append(-float(log_p[target]))
    return {"token accuracy": float(np.mean(right)), "nats per token": float(np.mean(nats))}


def exact_match(texts: Sequence[Text], fill: Callable[[Text], list[list[int]]]) -> float:
    """The share of short blanks that `fill` fills with the original. Args: fill: of all blanks of a text."""
    right = []
    for text in texts:
        for blank, filling in zip(text.blanks, fill(text), strict=True):
            if len(blank.original) <= SHORT:
                right.append(blank.original == filling)
    return float(np.mean(right)) if right else 0.0


def ngram_scores(model: NGram, texts: Sequence[Text]) -> dict[str, float]:
    def log_probabilities(text: Text) -> Iterator[tuple[int, np.ndarray]]:
        for blank in text.blanks:
            before = list(blank.before)
            for target in blank.original:
                yield target, np.log(model.probabilities(before))
                before.append(target)

    def fill(text: Text) -> list[list[int]]:
        return [model.continued(blank.before, len(blank.original)) for blank in text.blanks]

    return token_scores(texts, log_probabilities) | {"exact match": exact_match(texts, fill)}


def model_log_probabilities(model, text: Text, special: SpecialTokens) -> Iterator[tuple[int, np.ndarray]]:  # type: ignore[no-untyped-def]
    """(target id, log probabilities [V]) of each token in a text's blanks, from one forward pass."""
    import torch

    from megatron_lite.model.input.batch import Batch
    from megatron_lite.model.input.model_input import prepare

    device, example = next(model.parameters()).device, text.example
    planes = np.stack([getattr(example, name).view(np.int32) for name in FIELDS])
    host = prepare(Batch(planes[None]), device, model.config)
    is_wanted = (example.ord > 0) & (example.targets != special.eop) & (example.targets != special.eos)
    order = host.plan.order
    rows = np.flatnonzero((order >= 0) & is_wanted[order])
    inputs = host.to(device)
    with torch.no_grad():
        hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)[torch.from_numpy(rows)]
        log_p = model.logits(hidden).float().log_softmax(-1).cpu().numpy()
    yield from zip(example.targets[order[rows]].tolist(), log_p, strict=True)


def table(scores: dict[str, dict[str, float]], texts: Sequence[Text]) -> str:
    """The models side by side."""
    blanks = [blank for text in texts for blank in text.blanks]
    short = sum(len(blank.original) <= SHORT for blank in blanks)
    tokens = sum(len(blank.original) for blank in blanks)
    lines = [
        f"{len(blanks):,} blanks of {len(texts):,} validation texts: {tokens:,} tokens; {short:,} blanks are short",
        f"{'':16}" + "".join(f"{name:>10}" for name in MODELS),
    ]
    for figure, pattern in FIGURES.items():
        lines.append(
            f"{figure:16}" + "".join(f"{pattern.format(scores[name][figure]):>10}" for name in MODELS)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
