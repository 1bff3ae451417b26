"""Which share of a text's tokens begins words, and which is unknown, with warnings of unusual shares.

Builds report both, so no code of training is imported here: it takes half a second, in each process of a build.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from data_utils.tokenizers.vocabulary import Vocabulary

ENOUGH = 2000  # tokens, below which chance decides
_FEW_STARTS, _MANY_STARTS = 0.1, 0.98  # prose has 0.6 to 0.9, Chinese and WordLevel models 1
_MANY_UNKNOWN = 0.05  # of the tokens; emoji and rare scripts make less than 0.01 in prose


def word_shares(
    tokens: np.ndarray, vocabulary: Vocabulary, whose: str, objectives_of_words: Sequence[str] = ()
) -> Iterator[str]:
    """A line on where words begin in a text, then a warning. Args: objectives_of_words: their names."""
    if vocabulary.word_start is None:
        yield f"no word boundaries: {vocabulary.words_unknown}; objectives can mask single tokens only"
        return
    share = float(vocabulary.word_starts(tokens).mean()) if len(tokens) else 1.0
    note = ": each token is a word, so that hiding whole words hides single tokens" if share == 1.0 else ""
    yield f"words begin at {percent(share)} of {whose} tokens{note}"
    if objectives_of_words and len(tokens) >= ENOUGH and not _FEW_STARTS <= share <= _MANY_STARTS:
        reason = (
            "a word is a long text that is masked as a whole"
            if share < _FEW_STARTS
            else "a word is one token"
        )
        yield (
            f"warning: {', '.join(objectives_of_words)} masks whole words, but {percent(share)} of the tokens begin "
            f"a word: {reason}. Unless this is expected (proteins, Chinese), check the tokenizer."
        )


def unknown_share(tokens: np.ndarray, vocabulary: Vocabulary, whose: str) -> Iterator[str]:
    """A warning if much of a text is the token for what the vocabulary cannot write."""
    share = (
        0.0 if "unk" in vocabulary.lacking or not len(tokens) else np.mean(tokens == vocabulary.special.unk)
    )
    if share >= _MANY_UNKNOWN:
        yield (
            f"warning: {percent(float(share))} of {whose} tokens are the unknown token, so their text is lost. "
            "Does the tokenizer fit the language, script and letter case of the text?"
        )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
