"""The harness's three questions, against rows that are written by hand and computed one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.tasks.harness_runs import harness_run
from support.transformer.decoder_rows import next_logits

from data_utils.common.batch_fields import DOC, FIELDS, ORD, POSITION_IDS, TOKENS, WEIGHTS
from data_utils.common.errors import ConfigError, DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.finetune.harness import PSEUDO, Harness, HarnessOptions, before_first
from megatron_lite.inference.decoders import make_decoder
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch

PAIRS = [
    ("the quick brown", " fox"),
    ("the lazy dog", " jumps over the fox"),
    ("", " quick"),
    ("cafe", " the"),
]
WITH_GMASK = {"token_prob": 0.5, "sentence_prob": 0.0}
BY_HAND = ("causal", "prefix_lm", "unilm", "unilmv2", "t5", "bart", "mass")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}

    def get(objective, **options):
        key = (objective, *options.items())
        if key not in made:
            made[key] = harness_run(tmp_path_factory.mktemp(objective), objective, **options)
        return made[key]

    return get


def summed(rows, tokens):
    """The sum of the tokens' log probabilities, of [n, V], and whether each token is the likeliest."""
    log_p = torch.stack(rows).log_softmax(-1)
    total = sum(log_p[i, token].item() for i, token in enumerate(tokens))
    return total, log_p.argmax(-1).tolist() == list(tokens)


def by_hand(run, context, continuation):
    encode = run.tokenizer.encode
    before, after = encode(context), encode(continuation)
    return summed([next_logits(run, before, after[:i]) for i in range(len(after))], after)


def assert_equal(found, expected):
    # fp32, sums of up to ten log probabilities of order 10
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("objective", BY_HAND)
def test_log_probabilities_match_rows_by_hand(runs, objective):
    run = runs(objective)
    pairs = [*PAIRS, ("the fox", likely_after(run, "the fox"))]
    found = Harness(run, size=2).loglikelihood(pairs)
    assert_equal(found, [by_hand(run, *pair) for pair in pairs])
    assert not all(greedy for _, greedy in found)
    assert found[-1][1] or objective not in ("causal", "prefix_lm")  # elsewhere it may be a special token


def test_contexts_without_a_start_token(runs):
    """By the model's own rows: context and continuation alone; a continuation without a context still follows eos."""
    run = runs("causal")
    found = Harness(run, HarnessOptions(no_start=True), size=2).loglikelihood(PAIRS)
    expected = []
    for context, continuation in PAIRS:
        if not context:
            expected.append(by_hand(run, context, continuation))
            continue
        before, after = run.tokenizer.encode(context), run.tokenizer.encode(continuation)
        first = SimpleNamespace(special=SimpleNamespace(eos=before[0]))  # stands where eos stands in training
        plain = SimpleNamespace(objectives=run.objectives, model=run.model, tokenizer=first)
        rows = [next_logits(plain, before[1:], after[:i]) for i in range(len(after))]
        expected.append(summed(rows, after))
    assert_equal(found, expected)
    with_start = Harness(run, size=2).loglikelihood(PAIRS)
    assert abs(found[0][0] - with_start[0][0]) > 1e-3 and found[2] == with_start[2]
    with pytest.raises(ConfigError, match="no_start is set, but inputs of blank_infilling"):
        Harness(runs("blank_infilling"), HarnessOptions(no_start=True))
    longest = Harness(run, HarnessOptions(no_start=True, sequence_length=8))
    assert np.isfinite(longest.loglikelihood([("the quick " * 9, " fox jumps over the")])[0][0])


def likely_after(run, context):
    """The likeliest word that the tokenizer gives back as it is."""
    logits = next_logits(run, run.tokenizer.encode(context), [])
    logits[list(run.tokenizer.special_names)] = float("-inf")
    word = run.tokenizer.decode([int(logits.argmax())])
    # A piece of a word has the same token behind the context only.
    return word.removeprefix("##") if word.startswith("##") else f" {word}"


def filled_by_hand(run, context, mask, answer):
    filler = BlankFiller(run.model, run.tokenizer.special, GenerationConfig())
    plan = filler.encoded([context])
    with torch.no_grad():
        logits = filler.write(plan, [[run.tokenizer.special.sop, *answer[:-1]]], [context.index(mask)])[0]
    return summed(list(logits), answer)


def test_glm_continues_at_its_own_blank(runs):
    run = runs("blank_infilling", **WITH_GMASK)
    special, encode = run.tokenizer.special, run.tokenizer.encode
    found = Harness(run).loglikelihood(PAIRS)
    expected = []
    for context, continuation in PAIRS:
        part_a = [special.cls, *encode(context), special.gmask]  # open: without an end
        expected.append(filled_by_hand(run, part_a, special.gmask, encode(continuation)))
    assert_equal(found, expected)
    ended = Harness(run, HarnessOptions(mask="mask", score_end=True)).loglikelihood(PAIRS)
    expected = []
    for context, continuation in PAIRS:
        part_a = [special.cls, *encode(context), special.mask, special.eos]
        answer = [*encode(continuation), special.eop]
        expected.append(filled_by_hand(run, part_a, special.mask, answer))
    assert_equal(ended, expected)


def test_a_spelled_out_mask_is_a_blank_where_that_is_allowed(runs):
    run = runs("blank_infilling")
    special, encode = run.tokenizer.special, run.tokenizer.encode
    pair = ("the [MASK] fox.", " quick brown")
    part_a = [special.cls, *encode("the"), special.mask, *encode("fox."), special.eos]
    expected = filled_by_hand(run, part_a, special.mask, encode(pair[1]))
    assert_equal(Harness(run, HarnessOptions(allow_masks=True)).loglikelihood([pair]), [expected])
    as_text = Harness(run).loglikelihood([pair])
    assert as_text[0][0] != pytest.approx(expected[0], abs=0.1)
    with pytest.raises(DataError, match="has 2 blanks; a continuation fills only one"):
        Harness(run, HarnessOptions(allow_masks=True)).loglikelihood([("[MASK] or [MASK]", " the")])


def logits_of_row(run, tokens, positions, order, place):
    fields = np.zeros((1, len(FIELDS), len(tokens)), np.int32)
    fields[0, TOKENS], fields[0, POSITION_IDS], fields[0, ORD] = tokens, list(positions), list(order)
    fields[0, WEIGHTS, place] = np.float32(1.0).view(np.int32)
    fields[0, DOC] = 0
    inputs = MicroBatch.from_batch(Batch(fields), torch.device("cpu"), run.model.config)
    with torch.no_grad():
        hidden = run.model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
        return run.model.logits(hidden[inputs.loss_positions.tokens.long()])[0].float()


def test_bert_hides_each_token_in_turn(runs):
    run = runs("masked_lm")
    special, encode, expected = run.tokenizer.special, run.tokenizer.encode, []
    for context, continuation in PAIRS:
        before, after = encode(context), encode(continuation)
        whole = [special.cls, *before, *after, special.sep]
        rows = []
        for place in range(1 + len(before), 1 + len(before) + len(after)):
            hidden = [*whole[:place], special.mask, *whole[place + 1 :]]
            rows.append(logits_of_row(run, hidden, range(len(hidden)), [0] * len(hidden), place))
        expected.append(summed(rows, after))
    harness = Harness(run, size=3)
    assert_equal(harness.loglikelihood(PAIRS), expected)
    assert harness.report()["note"] == PSEUDO
    blank = Harness(run, HarnessOptions(allow_masks=True)).loglikelihood([("the [MASK] dog", " lazy")])
    assert blank == Harness(run, HarnessOptions(allow_masks=True)).loglikelihood(
        [("the [sMASK] dog", " lazy")]
    )
    with pytest.raises(ConfigError, match=r"perplexity, but a run of masked_lm"):
        harness.loglikelihood_rolling(["the fox"])
    with pytest.raises(ConfigError, match="does not train generation"):
        harness.generate_until([("the", {})])


def test_xlnet_asks_for_each_token_by_a_query(runs):
    run = runs("xlnet")
    special, encode, expected = run.tokenizer.special, run.tokenizer.encode, []
    pairs = [pair for pair in PAIRS if pair[0]]
    for context, continuation in pairs:
        before, after = encode(context), encode(continuation)
        rows = []
        for known in range(len(after)):
            tokens = [*before, *after[:known], special.mask]
            place = len(tokens) - 1
            order = [*[0] * len(before), *range(1, known + 1), -known - 1]
            rows.append(logits_of_row(run, tokens, range(len(tokens)), order, place))
        expected.append(summed(rows, after))
    assert_equal(Harness(run).loglikelihood(pairs), expected)
    # A text in one window is the chain of its tokens.
    (whole,) = Harness(run, HarnessOptions(first_token=False)).loglikelihood_rolling(["the quick brown fox"])
    assert whole == pytest.approx(Harness(run).loglikelihood([("the", " quick brown fox")])[0][0], abs=1e-4)


def test_requests_keep_their_order_in_every_batch(runs):
    run = runs("causal")
    pairs = [
        (" ".join(["the", "fox"] * n), word) for n in (5, 1, 3) for word in (" dog", " quick fox", " cafe")
    ]
    expected = [Harness(run).loglikelihood([pair])[0] for pair in pairs]
    for size in (1, 2, 16):
        assert_equal(Harness(run, size=size).loglikelihood(pairs), expected)


def test_choices_of_one_token_are_one_document(runs, monkeypatch):
    harness = Harness(runs("blank_infilling"))
    documents = []
    compute = harness._score_batch
    monkeypatch.setattr(harness, "_score_batch", lambda batch: documents.append(len(batch)) or compute(batch))
    harness.loglikelihood([("the dog", f" {word}") for word in ("fox", "dog", "lazy", "quick fox")])
    assert documents == [2]


def test_text_is_tokenized_as_one(runs):
    """A word that goes on after the context is a piece of it; where a token spans the boundary, both are apart."""
    layout = Harness(runs("causal")).template
    piece, word = (runs("causal").tokenizer.encode(text) for text in ("jumps", " s"))
    assert layout.tokenize("jump", "s").continuation == piece[1:] != word
    assert layout.tokenize("the ", "fox").continuation == layout.tokenize("the", " fox").continuation
    assert layout.tokenize("the f", "ox").context == runs("causal").tokenizer.encode("the f")
    assert layout.tokenize("the f", "ox").continuation == runs("causal").tokenizer.encode("ox")


@pytest.mark.parametrize("objective", ["causal", "prefix_lm", "blank_infilling", "xlnet"])
def test_whole_texts_have_the_probabilities_of_their_windows(runs, objective):
    """Each token once: the windows are asked one by one as contexts and continuations."""
    run = runs(objective, **(WITH_GMASK if objective == "blank_infilling" else {}))
    text = " ".join(["the quick brown fox", "jumps over the lazy dog"] * 5)
    asking = HarnessOptions(sequence_length=17, stride=6)
    harness = Harness(run, asking, size=2)
    (found,) = harness.loglikelihood_rolling([text])
    ids, total, seen = run.tokenizer.encode(text), 0.0, 0
    single = Harness(run, HarnessOptions(sequence_length=32))
    for start in range(0, len(ids), 6):
        known, new = ids[start:seen], ids[seen : start + 16]
        if not new:
            break
        text_of = run.tokenizer.decode
        total += single.loglikelihood([(text_of(known), " " + text_of(new))])[0][0]
        seen += len(new)
    assert seen == len(ids) and found == pytest.approx(total, abs=1e-3)
    first = harness.loglikelihood([("", "the")])[0][0]
    assert harness.loglikelihood_rolling(["", "the"]) == pytest.approx([0.0, first])
    if objective == "causal":  # elsewhere the first window is read in another way
        skipped = Harness(run, HarnessOptions(sequence_length=17, stride=6, first_token=False))
        assert skipped.loglikelihood_rolling([text])[0] == pytest.approx(found - first, abs=1e-4)


def test_long_contexts_lose_their_beginning_and_are_counted(runs):
    words = ["fox", "dog", "lazy", "quick"] * 12
    for objective, kept in (
        ("causal", 31),
        ("prefix_lm", 30),
        ("blank_infilling", 27),
        ("bart", 30),
        ("xlnet", 31),
    ):
        harness = Harness(runs(objective), HarnessOptions(sequence_length=32))
        (cut,) = harness.loglikelihood([(" ".join(words), " the")])
        assert cut == harness.loglikelihood([(" ".join(words[-kept:]), " the")])[0]
        assert harness.cut == 1 and harness.report()["cut"] == 1, objective
        if objective != "bart":  # its decoder has positions of its own
            assert cut != harness.loglikelihood([(" ".join(words[1 - kept :]), " the")])[0]
        harness.cut = 0
        assert harness.loglikelihood([(" ".join(words[-kept:]), " the")]) and harness.cut == 0


def test_a_continuation_longer_than_the_model_is_refused(runs):
    for objective in ("causal", "blank_infilling", "t5", "masked_lm"):
        harness = Harness(runs(objective))
        with pytest.raises(DataError, match=r"has 60 tokens.*shorten it"):
            harness.loglikelihood([("the", " fox" * 60)])
    with pytest.raises(DataError, match="the continuation ' ' has no token"):
        harness.loglikelihood([("the", " ")])


@pytest.mark.parametrize("objective", [*BY_HAND, "blank_infilling"])
def test_texts_end_before_the_first_stop_string(runs, objective):
    run = runs(objective)
    harness, contexts = Harness(run, size=2), ["the quick", "the lazy dog", "cafe"]
    options = {"until": [], "max_gen_toks": 8}
    whole = harness.generate_until([(context, options) for context in contexts])
    decoder = make_decoder(run, GenerationConfig(max_length=8))
    for context, text in zip(contexts, whole, strict=True):
        prompt = harness.template.prompt(context, 8)[0]
        assert text == run.tokenizer.decode(decoder.generate([prompt])[0], skip_special=True)
    stop = whole[0][3:5]
    asked = [(contexts[1], options), (contexts[0], {**options, "until": stop}), (contexts[2], options)]
    assert harness.generate_until(asked) == [whole[1], whole[0].partition(stop)[0], whole[2]]
    assert before_first("a b c", ["c", "b"]) == "a " and before_first("abc", ["", "d"]) == "abc"


def test_an_answer_is_not_written_on_after_its_stop(runs, monkeypatch):
    run = runs("causal")
    harness = Harness(run)
    (text,) = harness.generate_until([("the", {"max_gen_toks": 20})])
    steps = []
    logits = type(run.model).logits
    monkeypatch.setattr(type(run.model), "logits", lambda *a: steps.append(1) or logits(*a))
    first = text.split()[0]
    harness.generate_until([("the", {"max_gen_toks": 20, "until": [first[:1]]})])
    assert len(steps) == 1


def test_settings_of_generation(runs):
    harness = Harness(runs("causal"))
    assert harness.generate_until([("the", {"max_gen_toks": 6, "until": [""]})]) == harness.generate_until(
        [("the", {"max_gen_toks": 6})]
    )
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "temperature": 0.0}
    found = harness.generate_until([("the fox", beams)])
    decoder = make_decoder(runs("causal"), GenerationConfig(strategy="beam", num_beams=3, max_length=6))
    prompt = harness.template.prompt("the fox", 6)[0]
    assert found == [runs("causal").tokenizer.decode(decoder.generate([prompt])[0])]
    drawn = {"temperature": 2.0, "max_gen_toks": 6, "seed": 3}
    assert harness.generate_until([("the fox", drawn)]) != harness.generate_until(
        [("the fox", {**drawn, "seed": 4})]
    )
    for options, message in {
        "generation_kwargs has the unknown repetition_penalty": {"repetition_penalty": 2.0},
        "generation_kwargs.top_p is 3.0": {"do_sample": True, "top_p": 3.0},
        "generation_kwargs.temperature is 'hot'; it must be a number": {"temperature": "hot"},
        "generation_kwargs.num_beams is 'two'; it must be a number": {"num_beams": "two"},
        "generation_kwargs.max_length .*'many'": {"max_gen_toks": "many"},
        "generation_kwargs.until is 5; it must be strings": {"until": 5},
        "leave no tokens for a context in a model of 32 positions; lower max_gen_toks": {"max_gen_toks": 31},
    }.items():
        with pytest.raises(ConfigError, match=options):
            harness.generate_until([("the", message)])


def test_settings_that_a_run_cannot_take(runs):
    cases = {
        "inputs of causal have no blanks": ("causal", HarnessOptions(allow_masks=True)),
        "but masked_lm predicts no end token": ("masked_lm", HarnessOptions(score_end=True)),
        "sequence_length is 33, but the model has 32 positions": (
            "causal",
            HarnessOptions(sequence_length=33),
        ),
        "sequence_length is 7; it must be at least 8": ("causal", HarnessOptions(sequence_length=7)),
        "task.form is causal, but the run's objective is t5": ("t5", HarnessOptions(form="causal")),
        "the mask is gmask, but inputs of causal do not choose one": ("causal", HarnessOptions(mask="gmask")),
        "read from left to right, but inputs of masked_lm do not choose that": (
            "masked_lm",
            HarnessOptions(bidirectional=False),
        ),
    }
    for message, (objective, asking) in cases.items():
        with pytest.raises(ConfigError, match=message):
            Harness(runs(objective), asking)
    with pytest.raises(ConfigError, match=r"the stride \(31\) must be below the window size \(31\)"):
        Harness(runs("causal"), HarnessOptions(stride=31)).loglikelihood_rolling(["the"])
    for objective in ("unilm", "t5"):
        with pytest.raises(ConfigError, match=f"but a run of {objective} gives no likelihood"):
            Harness(runs(objective)).loglikelihood_rolling(["the"])
