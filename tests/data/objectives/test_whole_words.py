"""Whole words with tokenizers of every family, through every objective of words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from support.data import word_families
from support.data.word_families import CHINESE, MARKED, MODELS, PROSE
from tokenizers import decoders, pre_tokenizers

from data_utils.common.errors import ConfigError
from data_utils.loader.blanks import blank_tokens
from data_utils.objectives import OBJECTIVES
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from data_utils.tokenizers.vocabulary import Vocabulary, vocabulary_of

FAMILIES = word_families.families()
# Each with the settings that make it mask words; objectives that read labels of tokens fill rows as these do.
OBJECTIVES_OF_WORDS = {
    "masked_lm": {"whole_words": True},
    "spanbert": {},
    "albert": {"sentence_order": False},
    "ernie": {},
    "blank_infilling": {"whole_words": True, "single_span_prob": 0.0},
    "sentence_reordering": {},
    "sentence_distance": {},
    "token_document": {},
}


@dataclass
class Family:
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    cut: str

    def read(self, text: str) -> tuple[np.ndarray, dict[int, bool]]:
        """Tokens, and for those that are known text of a word whether they are its first."""
        text = word_families.subword_nmt(text) if self.cut == "nmt" else text
        text = " ".join(text.split()) if self.tokenizer.config.kind == "sentencepiece" else text
        ids, places = self.tokenizer.encode_with_offsets(text)
        unknown = [self.tokenizer.is_unknown(token) for token in ids]
        # Unknown text of several words may be one token, or one word several.
        return np.array(ids, np.int32), {
            i: begins
            for i, begins in word_families.expected_starts(text, places, self.cut).items()
            if not any(unknown[max(0, i - 1) : i + 1])
        }


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    made: dict[str, Family] = {}

    def open_one(name: str, added_tokens: str = "glm") -> Family:
        key = f"{name} {added_tokens}"
        if key not in made:
            path, kind = tmp_path_factory.mktemp("family"), "hf_json"
            if name.startswith("sentencepiece "):
                kind, model = "sentencepiece", MODELS[name.removeprefix("sentencepiece ")]
                (path / "tokenizer.model").write_bytes(word_families.sentencepiece_model(**model))
                cut = "after ▁" if "suffix" in name else "spaces ▁"
            else:
                make, cut = FAMILIES[name]
                make().save(str(path / "tokenizer.json"))
            tokenizer = load_tokenizer(TokenizerConfig(kind=kind, path=str(path), added_tokens=added_tokens))
            made[key] = Family(tokenizer, vocabulary_of(tokenizer), cut)
        return made[key]

    return open_one


NAMES = (*FAMILIES, *(f"sentencepiece {name}" for name in MODELS))


@pytest.mark.parametrize("name", NAMES)
def test_words_begin_where_the_text_has_them(opened, name):
    """Also in text that spells the marks of other families."""
    family = opened(name)
    compared = 0
    for text in (*PROSE, *MARKED, CHINESE):
        ids, expected = family.read(text)
        starts = family.vocabulary.word_starts(ids)
        starts[0] = True  # as for all objectives
        assert {i: bool(starts[i]) for i in expected} == expected, text
        compared += len(expected)
    assert compared > 90


@pytest.mark.parametrize("objective", OBJECTIVES_OF_WORDS)
@pytest.mark.parametrize("name", ["wordpiece ##", "bpe with a suffix", "byte level", "subword-nmt", "llama",
                                  "unigram, metaspace always True", "sentencepiece suffix", "words"])  # fmt: skip
def test_objectives_hide_whole_words(opened, name, objective):
    """As large a share as asked for, no word in part, and the text comes back."""
    family = opened(name)
    made_by = OBJECTIVES[objective]
    config = made_by.config_class(**OBJECTIVES_OF_WORDS[objective])
    made = made_by(config, family.vocabulary, 7, 1024)
    ids, expected = family.read(" ".join(PROSE * 2))
    first = [i for i in range(len(ids)) if expected.get(i, i == 0)]
    words = np.split(np.arange(len(ids)), first[1:])
    hidden_tokens, whole, many = 0, 0, 60
    for sample in range(many):
        hidden, text = hidden_places(made.example(ids, sample), family, objective, len(ids))
        if objective not in ("sentence_reordering", "sentence_distance"):
            assert text == ids.tolist(), "the text comes back"
            parts = [set(word.tolist()) & hidden for word in words]
            cut = sum(0 < len(part) < len(word) for part, word in zip(parts, words, strict=True))
            assert cut <= (objective == "token_document"), "which cuts the text in two, maybe within a word"
            whole += sum(map(bool, parts))
        hidden_tokens += len(hidden)
    assert hidden_tokens / many / len(ids) == pytest.approx(0.15, abs=0.05)
    assert whole >= many or objective.startswith("sentence_")


def hidden_places(example, family, objective, length):
    """Places of the text that are hidden, and the text with all of them shown again."""
    special = family.tokenizer.special
    if objective == "blank_infilling":
        spans = iter(blank_tokens(example, special))
        places, text = set(), []
        for token in example.tokens[example.ord == 0].tolist()[1:]:
            shown = next(spans) if token == special.mask else [token]
            places |= set(range(len(text), len(text) + len(shown))) if token == special.mask else set()
            text += shown
        return places, text
    masked = (example.weights > 0) & (example.objective == OBJECTIVES[objective].losses[0].number)
    text = np.where(masked, example.targets, example.tokens)
    inside = ~np.isin(example.tokens, [special.cls, special.sep]) | masked
    places = np.cumsum(inside) - 1
    return set(places[masked].tolist()), text[inside].tolist()


UNKNOWN = {
    "words without marks": lambda: word_families._bpe(word_families.BERT_WORDS(), unk_token="[UNK]"),
    "characters": lambda: word_families._bpe(word_families._split("", "isolated"), unk_token="[UNK]"),
    "unigram without spaces": lambda: word_families._unigram(word_families.BERT_WORDS()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_words_cannot_be_known_objectives_of_words_say_so(tmp_path, name):
    """One line with the tokenizer, the reason and the setting that masks tokens instead, which then does."""
    UNKNOWN[name]().save(str(tmp_path / "tokenizer.json"))
    vocabulary = vocabulary_of(load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path))))
    for objective, settings in OBJECTIVES_OF_WORDS.items():
        made_by = OBJECTIVES[objective]
        remedy = "segmenter=tokens" if objective == "ernie" else "whole_words=false"
        with pytest.raises(ConfigError, match=f"{tmp_path} .*(spaces|characters).*{objective}.{remedy}"):
            made_by(made_by.config_class(**settings), vocabulary, 7, 128)
        key, value = remedy.split("=")
        other = settings | {key: {"false": False}.get(value, value)}
        made_by(made_by.config_class(**other), vocabulary, 7, 128)


@pytest.mark.parametrize(
    "name", ["bpe, metaspace", "metaspace of another mark", "sentencepiece bpe", "byte level"]
)
def test_a_text_after_a_special_token_keeps_its_space(opened, name, tmp_path):
    """Whatever the mark of a space is."""
    if name == "metaspace of another mark":
        space = pre_tokenizers.Metaspace(replacement="~"), decoders.Metaspace(replacement="~")
        word_families._bpe(space[0], unk_token="[UNK]", decoder=space[1]).save(
            str(tmp_path / "tokenizer.json")
        )
        tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
    else:
        tokenizer = opened(name).tokenizer
    ids = tokenizer.encode(" stones and stones")
    assert tokenizer.decode([tokenizer.special.cls, *ids]).endswith("] stones and stones")
