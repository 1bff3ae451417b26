"""Decoders against the same model without a cache: the row of training, computed anew for each token."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support.transformer.decoder_rows import MODELS, SPECIAL, TEXTS, make_run, next_logits

from data_utils.common.errors import ConfigError, DataError
from data_utils.tokenizers.special_tokens import NO_TOKEN
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.decoders import ignored_tokens, make_decoder


@pytest.fixture(scope="module")
def runs():
    return {objective: make_run(objective) for objective in MODELS}


ENDS = {"unilm": {2}, "unilmv2": {2}, "mass": {2, 8}}
WRITERS = [name for name in MODELS if name != "blank_infilling"]


def written(run, text, length, at_least):
    """Greedily, without a cache."""
    name, answer = run.objectives[0].name, []
    ends = ENDS.get(name, {8})
    banned = set(dataclasses.asdict(SPECIAL).values()) - ends
    while len(answer) < length:
        logits = next_logits(run, text, answer)
        logits[[*banned, *(ends if len(answer) < at_least else [])]] = float("-inf")
        token = int(logits.argmax())
        if token in ends:
            return answer
        answer.append(token)
    return answer


@pytest.mark.parametrize("objective", WRITERS)
def test_answers_match_the_model_without_a_cache(runs, objective):
    run = runs[objective]
    decoder = make_decoder(run, GenerationConfig(max_length=6, min_length=3))
    found = decoder.generate([decoder.context(text) for text in TEXTS])
    assert found == [written(run, text, 6, 3) for text in TEXTS]
    assert len({str(answer) for answer in found}) > 1


@pytest.mark.parametrize("objective", WRITERS)
def test_beams_have_the_probabilities_of_the_model_without_a_cache(runs, objective):
    run = runs[objective]
    config = GenerationConfig(strategy="beam", num_beams=3, length_penalty=0.0, max_length=4, min_length=2)
    decoder = make_decoder(run, config)
    contexts = [decoder.context(text) for text in TEXTS]
    kept, search = [], decoder.search.run
    decoder.search.run = lambda *arguments: kept.append(search(*arguments)) or kept[-1]
    together = decoder.generate(contexts)
    assert together == [decoder.generate([context])[0] for context in contexts]
    for text, answers in zip(TEXTS, kept[0], strict=True):
        assert len(answers) == 3
        for answer in answers[:2]:
            log_p = [
                next_logits(run, text, answer.tokens[:i]).log_softmax(-1)
                for i in range(len(answer.tokens) + 1)
            ]
            total = sum(log_p[i][token].item() for i, token in enumerate(answer.tokens))
            ends = [log_p[-1][end].item() for end in ENDS.get(objective, {8})] if answer.ended else [0.0]
            assert any(answer.score == pytest.approx(total + end, abs=1e-4) for end in ends)


def test_a_batch_has_the_logits_of_its_texts_alone(runs):
    for objective in WRITERS:
        decoder = make_decoder(runs[objective], GenerationConfig())
        contexts = [decoder.context(text) for text in TEXTS]
        parts = [contexts, *([context] for context in contexts)]
        states = [decoder.template.make(decoder.model, part, decoder.template) for part in parts]
        with torch.no_grad():
            for token in (None, 33, 12, 33):
                steps = [
                    s.first() if token is None else s.next([token] * len(s.next_positions)) for s in states
                ]
                # fp32, logits of order 1
                torch.testing.assert_close(steps[0], torch.cat(steps[1:]), rtol=0, atol=1e-5, msg=objective)


def test_sampled_answers_do_not_depend_on_the_batch(runs):
    config = GenerationConfig(strategy="sample", temperature=2.0, max_length=6)
    for objective in ("unilm", "bart"):
        decoders = [make_decoder(runs[objective], config) for _ in range(2)]
        contexts = [decoders[0].context(text) for text in TEXTS]
        assert decoders[0].generate(contexts) == [decoders[1].generate([c])[0] for c in contexts]


def test_texts_are_taken_in_parts_where_memory_is_short(runs, monkeypatch):
    config = GenerationConfig(strategy="beam", num_beams=2, max_length=4)
    decoder = make_decoder(runs["bart"], config)
    contexts = [decoder.context(text) for text in TEXTS]
    whole, parts, make = decoder.generate(contexts), [], decoder.template.make
    row_bytes = 4 * (2 * 4 * 32 * (9 + 4) + 4 * 40)  # four layers, the longest text with its answer
    monkeypatch.setattr("megatron_lite.inference.memory.MAX_BYTES", 3 * 2 * row_bytes)
    counted = dataclasses.replace(decoder.template, make=lambda *a: parts.append(len(a[1])) or make(*a))
    monkeypatch.setattr(decoder, "template", counted)
    assert decoder.generate(contexts) == whole and parts == [3, 1]
    monkeypatch.setattr("megatron_lite.inference.memory.MAX_BYTES", row_bytes)
    with pytest.raises(DataError, match=r"num_beams \(2\) need .* set it to 1 or less"):
        decoder.generate(contexts)


def test_blanks_are_answers_too(runs):
    decoder = make_decoder(runs["blank_infilling"], GenerationConfig(max_length=5))
    contexts = [decoder.context([*text, 5]) for text in TEXTS]
    assert contexts[0] == [1, 20, 21, 22, 5]
    found = decoder.generate(contexts)
    assert found == [decoder.filler.fill(context)[0] for context in contexts]
    with pytest.raises(DataError, match="the text has 2 blanks"):
        decoder.generate([decoder.context([20, 3, 4])])


def test_bart_that_predicts_cls_begins_with_it(runs):
    """It is no part of the answer, but of its length."""
    run = make_run("bart", predict_cls=True)
    decoder = make_decoder(run, GenerationConfig(max_length=3, min_length=2))
    (answer,) = decoder.generate([decoder.context(TEXTS[0])])
    first = next_logits(run, TEXTS[0], [1])
    first[list(range(11))] = float("-inf")
    assert answer[0] == int(first.argmax())
    assert decoder.search.unseen == 1


def test_a_vocabulary_without_eos_writes_to_the_limit():
    run = make_run("causal", special=dataclasses.replace(SPECIAL, eos=NO_TOKEN))
    decoder = make_decoder(run, GenerationConfig(max_length=4))
    assert decoder.context([20]) == [20]
    assert [len(answer) for answer in decoder.generate([[20], [21, 22]])] == [4, 4]


def test_answers_end_where_positions_do(runs):
    for objective, most in (("causal", 31 - 21), ("unilm", 31 - 22), ("bart", 31), ("t5", 40)):
        run = runs[objective]
        decoder = make_decoder(run, GenerationConfig(max_length=40, min_length=39))
        (answer,) = decoder.generate([decoder.context([20] * 20)])
        assert len(answer) == most
    with pytest.raises(DataError, match=r"has 32 tokens .* positions for 31"):
        make_decoder(runs["causal"], GenerationConfig()).generate([[20] * 32])
    with pytest.raises(DataError, match="has 32 tokens"):
        make_decoder(runs["bart"], GenerationConfig()).generate([[20] * 32])
    with pytest.raises(DataError, match="the text has no token"):
        make_decoder(runs["causal"], GenerationConfig()).generate([[]])


def test_runs_that_cannot_write_are_refused(runs):
    run = make_run("causal")
    run.objectives = (SimpleNamespace(name="masked_lm", section=None),)
    with pytest.raises(ConfigError, match=r"runs/some was trained on masked_lm"):
        make_decoder(run, GenerationConfig())


class Words:
    def encode_with_specials(self, text):
        return {".": [30], " .": [31], "[SEP]": [2], " [SEP]": [32, 2]}.get(text, [33, 34])


def test_tokens_after_which_all_may_repeat():
    config = GenerationConfig(no_repeat_ngram_size=3, no_repeat_except=". [SEP]")
    assert ignored_tokens(Words(), config) == {30, 31, 2}
    with pytest.raises(ConfigError, match="no_repeat_except has 'words', which is 2 tokens"):
        ignored_tokens(Words(), dataclasses.replace(config, no_repeat_except="words"))
