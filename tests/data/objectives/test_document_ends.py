"""How documents end in rows, and which special tokens an objective needs: vocabularies that lack some."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import numpy as np
import pytest
from support.data.recipes import FIRST_TEXT_TOKEN, SPECIAL, vocabulary

from data_utils.common.batch_fields import TARGETS, TOKENS, WEIGHTS
from data_utils.common.errors import ConfigError
from data_utils.loader.loader import collate
from data_utils.objectives import OBJECTIVES, make_one
from data_utils.tokenizers.published_tokens import own_special_tokens
from data_utils.tokenizers.special_tokens import NO_TOKEN

WITH_SEP = ("masked_lm", "spanbert", "albert", "ernie", "unilm", "unilmv2", "mass", "xlnet")
BERT, BERT_LACKS = own_special_tokens({"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103})
T5, T5_LACKS = own_special_tokens({"pad": 0, "eos": 1, "unk": 2})
GPT, GPT_LACKS = own_special_tokens({"unk": 0})


def made(name, special, lacking=frozenset(), length=40, **settings):
    words = replace(vocabulary(), special=special, lacking=lacking)
    return make_one(name, OBJECTIVES[name].config_class(**settings), words, 5, length)


def rows_of(objective, chunks):
    """One row for each list of chunks: Examples without padding."""
    tokens = np.concatenate([chunk for row in chunks for chunk in row]).astype(np.int32)
    lengths = np.array([len(chunk) for row in chunks for chunk in row], np.int64)
    counts = np.array([len(row) for row in chunks], np.int64)
    return collate(objective, tokens, lengths, counts, np.arange(len(chunks)))


def text(length, end=None):
    tokens = np.arange(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + length, dtype=np.int32)
    if end is not None:
        tokens[-1] = end
    return tokens


@pytest.mark.parametrize("name", WITH_SEP)
@pytest.mark.parametrize("end", ["sep", "pad"])
def test_a_row_of_bert_has_one_sep_after_the_text_and_no_padding_in_it(name, end):
    """Documents of GLM's BERT end in [PAD], documents of the published vocabulary in [SEP]."""
    special = BERT if end == "sep" else replace(SPECIAL, eos=SPECIAL.pad)
    objective = made(name, special)
    ended, open_end = text(12, special.eos), text(11)
    assert (
        made(name, special).example(ended, 3).tokens.tolist()
        == made(name, special).example(open_end, 3).tokens.tolist()
    )
    # Two documents, and one cut by the window: what follows a shortened chunk must not move.
    for row in rows_of(objective, [[text(9, special.eos), text(12, special.eos), text(5)]] * 30):
        tokens, doc = row[0], row[5]
        assert special.pad not in tokens[doc >= 0]
        for number in range(3):
            own = tokens[doc == number].tolist()
            assert not any(a == b == special.sep for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("name", WITH_SEP)
def test_an_end_of_its_own_stays_in_the_text(name):
    assert SPECIAL.eos in made(name, SPECIAL).example(text(12, SPECIAL.eos), 3).tokens


@pytest.mark.parametrize("name", WITH_SEP)
def test_a_chunk_of_only_an_end_still_has_an_example(name):
    for row in rows_of(made(name, BERT), [[np.array([BERT.sep]), text(6)]]):
        assert set(row[5].tolist()) >= {0, 1}
        assert not row[4][row[5] == 0].any()


def test_gpt_predicts_what_follows_the_first_token():
    objective = made("causal", GPT, GPT_LACKS)
    example = objective.example(text(6), 0)
    assert example.tokens.tolist() == text(6).tolist()
    assert example.targets.tolist() == [*text(6)[1:].tolist(), 0]
    assert example.weights.tolist() == [1, 1, 1, 1, 1, 0]
    # With an eos every token is predicted, the first one from it.
    example = made("causal", SPECIAL).example(text(6, SPECIAL.eos), 0)
    assert example.tokens.tolist() == [SPECIAL.eos, *text(5).tolist()]
    assert example.targets.tolist() == text(6, SPECIAL.eos).tolist() and example.weights.all()
    assert GPT.eos == NO_TOKEN


def test_a_text_begins_as_its_family_does():
    """Llama's with CLS, Qwen's with its own first token, which nothing predicts, though the vocabulary has an eos."""
    example = made("causal", SPECIAL, begin="cls").example(text(6, SPECIAL.eos), 0)
    assert example.tokens.tolist() == [SPECIAL.cls, *text(5).tolist()]
    assert example.targets.tolist() == text(6, SPECIAL.eos).tolist() and example.weights.all()
    example = made("causal", SPECIAL, begin="none").example(text(6, SPECIAL.eos), 0)
    assert example.tokens.tolist() == text(6, SPECIAL.eos).tolist()
    assert example.targets[:-1].tolist() == text(6, SPECIAL.eos)[1:].tolist() and not example.weights[-1]
    with pytest.raises(ConfigError, match="causal needs the special token cls"):
        made("causal", GPT, GPT_LACKS, begin="cls")


def test_t5s_decoder_begins_with_pad():
    objective = made("t5", T5, T5_LACKS, sentinel_first=999)
    example = objective.example(text(30, T5.eos), 0)
    (first,) = np.flatnonzero(example.ord == 1)
    assert example.tokens[first] == T5.pad and example.targets[example.ord > 0][-1] == T5.eos
    with_sop = made("t5", SPECIAL, sentinel_first=999).example(text(30, SPECIAL.eos), 0)
    assert with_sop.tokens[np.flatnonzero(with_sop.ord == 1)[0]] == SPECIAL.sop


@pytest.mark.parametrize(
    ("name", "lacking", "settings", "missing"),
    [
        ("blank_infilling", BERT_LACKS, {}, "tokens sop, eop"),
        ("blank_infilling", frozenset({"dblock"}), {"block_mask_prob": 0.1}, "token dblock"),
        ("blank_infilling", T5_LACKS, {"masked_lm": True, "token_prob": 1.0}, "tokens cls, mask"),
        ("masked_lm", T5_LACKS, {}, "tokens cls, sep, mask"),
        ("t5", GPT_LACKS, {"sentinel_first": 999}, "token eos"),
        ("bart", GPT_LACKS, {}, "tokens cls, mask, eos"),
        ("prefix_lm", GPT_LACKS, {}, "tokens cls, eos"),
    ],
)
def test_an_objective_whose_tokens_are_lacking_is_refused_by_name(name, lacking, settings, missing):
    with pytest.raises(
        ConfigError, match=f"{name} needs the special {missing}, .* tokenizer.added_tokens=glm"
    ):
        made(name, SPECIAL, lacking, **settings)


@pytest.mark.parametrize("name", ["t5", "ul2"])
def test_an_objective_without_its_sentinels_is_refused_with_what_adds_them(name):
    """[MASK] is no sentinel, whatever else the vocabulary has."""
    words = replace(vocabulary(), sentinels=())
    with pytest.raises(
        ConfigError, match=f"^{name} needs the sentinels <extra_id_0>, .* tokenizer.added_tokens=t5"
    ):
        make_one(name, OBJECTIVES[name].config_class(), words, 5, 40)


CHOSEN = {  # so that what else an objective may write is written, too
    "blank_infilling": {
        "token_prob": 0.3,
        "sentence_prob": 0.3,
        "block_mask_prob": 0.5,
        "context_mask_ratio": 0.5,
    },
    "masked_lm": {"next_sentence": True},
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OBJECTIVES.own  # others have corpora of their own
        if not OBJECTIVES[name].config_class.token_annotation
        and not OBJECTIVES[name].config_class.whole_documents
    ],
)
def test_an_objective_writes_no_token_that_it_does_not_ask_for(name):
    """All roles that it does not need are lacking, and their ids, which stand for nothing, occur nowhere.

    Texts have an end where the vocabulary has one; without sop T5's decoder begins with pad, others with eos.
    """
    section = OBJECTIVES[name].config_class(**CHOSEN.get(name, {}))
    lacking = {
        role: 500 + i
        for i, role in enumerate(asdict(SPECIAL))
        if role not in (*section.needed_roles, "eos", "pad")
    }
    if "eos" in section.needed_roles and "sop" in lacking:
        lacking["sop"] = SPECIAL.eos
    words = replace(vocabulary(), special=replace(SPECIAL, **lacking), lacking=frozenset(lacking))
    rows = rows_of(make_one(name, section, words, 5, 200), [[text(100, SPECIAL.eos), text(60)]] * 60)
    written = {*rows[:, TOKENS].ravel().tolist(), *rows[:, TARGETS].ravel().tolist()}
    assert not {role for role, token in lacking.items() if token in written - {SPECIAL.eos}}
    for role in section.needed_roles:
        with pytest.raises(ConfigError, match=f"needs the special token {role}"):
            make_one(name, section, replace(words, lacking=frozenset({role})), 5, 200)


def test_random_tokens_are_tokens():
    """Not ids that only make the table of embeddings as long as the released one."""
    words = replace(vocabulary(), num_tokens=FIRST_TEXT_TOKEN + 20)
    section = OBJECTIVES["masked_lm"].config_class(mask_token_prob=0.0, random_token_prob=1.0)
    objective = make_one("masked_lm", section, words, 5, 40)
    chunk = np.full(30, FIRST_TEXT_TOKEN, np.int32)
    examples = [objective.example(chunk, sample) for sample in range(200)]
    drawn = set(np.concatenate([example.tokens[example.weights > 0] for example in examples]).tolist())
    assert len(drawn) > 500 and max(drawn) < words.num_tokens < words.size


@pytest.mark.parametrize("name", [*WITH_SEP, "bart", "t5", "prefix_lm", "causal"])
def test_what_bert_has_is_enough_for_all_but_blank_infilling(name):
    rows = rows_of(made(name, BERT, BERT_LACKS), [[text(12)]] * 8)
    assert (rows[:, WEIGHTS] != 0).any() and (rows[:, TOKENS] != NO_TOKEN).all()
