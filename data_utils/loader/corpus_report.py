"""Report of the tokens and epochs of each corpus that a whole run reads, with warnings of unusual numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

import numpy as np

from data_utils.loader.loader import Datasets, SampleLoader
from data_utils.loader.mixture import BLOCK_SIZE, Index, Mixture, epoch_tokens

# Muennighoff et al. (arXiv:2305.16264): up to 4 epochs change the loss negligibly against new text; with more, what
# they add falls towards nothing.
USEFUL_EPOCHS = 4
MOST_SKIPPED = 0.1  # of a corpus's documents, before that is warned of
_SHOWN = 8  # corpora


def corpus_report(mixtures: Sequence[Mixture], samples: int, batch_size: int) -> Iterator[str]:
    """The amount of text that a run of `samples` samples reads, a line; of its corpora and phases; then warnings.

    Args: mixtures: of the phases.
    """
    firsts = [mixture.start.first_sample for mixture in mixtures]
    counts = [stop - first for first, stop in zip(firsts, [*firsts[1:], samples], strict=True)]
    epochs_after = [mixture.epochs(count) for mixture, count in zip(mixtures, counts, strict=True)]
    dealt = [mixture.dealt(count) for mixture, count in zip(mixtures, counts, strict=True)]
    indexes, of_corpora = mixtures[0].indexes, np.sum(dealt, axis=0)
    corpora = [
        (str(index.dataset.prefix), epoch_tokens(index), epochs, index.num_windows)
        for index, epochs in zip(indexes, epochs_after[-1], strict=True)
    ]
    total = sum(tokens * epochs for _, tokens, epochs, _ in corpora)
    yield f"training reads {total:,.0f} tokens in {samples:,} samples"
    for index, count, (name, tokens, epochs, windows) in list(zip(indexes, of_corpora, corpora, strict=True))[
        :_SHOWN
    ]:
        yield (
            f"{name}: {len(index.dataset):,} documents, {tokens:,} tokens, {windows:,} windows; {count:,} samples "
            f"({count / max(1, samples):.1%}), {tokens * epochs / max(1, total):.1%} of the tokens, "
            f"read {_times(epochs)}"
        )
    if len(corpora) > _SHOWN:
        yield f"and {len(corpora) - _SHOWN} more corpora"
    before = [0.0] * len(indexes)
    for number, after in enumerate(epochs_after if len(mixtures) > 1 else (), start=1):
        read = [
            (PurePath(index.dataset.prefix).name, last - first, epoch_tokens(index))
            for index, first, last in zip(indexes, before, after, strict=True)
        ]
        listed = [f"{name} {_times(epochs)}" for name, epochs, _ in read if epochs][:_SHOWN]
        total = sum(epochs * tokens for _, epochs, tokens in read)
        yield f"phase {number} reads {total:,.0f} tokens: {', '.join(listed)}"
        before = after
    yield from _skipped_documents(indexes)
    for count, (name, tokens, epochs, windows) in zip(of_corpora, corpora, strict=True):
        if not count:
            yield (
                f"warning: {name} is not read: its weight is 0, or max_epochs leaves it less than one sample, or one "
                f"in {BLOCK_SIZE}."
            )
            continue
        if epochs > USEFUL_EPOCHS:
            yield (
                f"warning: {name} is read {_times(epochs)}; text that is read up to {USEFUL_EPOCHS} times is worth "
                "nearly as much as new text, beyond that ever less (Muennighoff et al., 2023). Add text, lower "
                "training.steps, or set max_epochs of this corpus."
            )
        if windows < batch_size:
            yield (
                f"warning: {name} has {tokens:,} tokens, {windows:,} samples, fewer than the batch size "
                f"({batch_size:,}), so one step reads the same text more than once."
            )


def _skipped_documents(indexes: Sequence[Index]) -> Iterator[str]:
    """Warnings of corpora whose documents are mostly longer than a sentence may be."""
    for index in indexes:
        too_long = getattr(index, "too_long", 0)
        if too_long > MOST_SKIPPED * len(index.dataset):
            yield (
                f"warning: {too_long:,} of {len(index.dataset):,} documents of {index.dataset.prefix} are longer "
                "than data.sequence_length and are skipped, because each document must be one sentence. Split the "
                "texts with scripts/split_sentences.py and rebuild the corpus, or raise data.sequence_length."
            )


def overlap(data: Datasets) -> Iterator[str]:
    """Warnings of corpora with the same texts: of training twice, and of validation on what is trained."""
    entries = data.train.fingerprint()
    names = [str(index.dataset.prefix) for index in data.train.mixture.indexes]
    seen: dict[str, str] = {}
    for entry, name in zip(entries, names, strict=True):
        first = seen.setdefault(str(entry["sha256"]), name)
        if first != name:
            yield (
                f"warning: data.train contains the same tokens twice, as {first} and {name}, so both weights count; "
                "remove one and give the other the sum of the weights."
            )
    trained = _by_content(data.train)
    for content, name in _by_content(data.validation).items() if data.validation else ():
        if content in trained:
            yield (
                f"warning: the validation corpus {name} has the same tokens as the training corpus "
                f"{trained[content]}, so its loss does not measure unseen text; build both with --split."
            )


def _by_content(loader: SampleLoader) -> dict[str, str]:
    """Checksum of a corpus's tokens -> its name."""
    prefixes = [str(index.dataset.prefix) for index in loader.mixture.indexes]
    return {str(entry["sha256"]): name for entry, name in zip(loader.fingerprint(), prefixes, strict=True)}


def _times(epochs: float) -> str:
    return f"{epochs:,.0f} times" if epochs >= 10 else f"{epochs:.3g} times"
