import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.configs import tiny

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, FIELDS, ORD, POSITION_IDS, TOKENS, WEIGHTS
from data_utils.common.errors import ConfigError, DataError
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.config.model import BLOCK_POSITIONS, ModelConfig
from megatron_lite.inference.filling import (
    BlankFiller,
    GenerationConfig,
    blank_context,
    insert_spans,
    span_text,
)
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

SPECIAL = SpecialTokens(cls=1, sep=2, mask=3, smask=4, gmask=5, sop=6, eop=7, eos=8, pad=0, unk=9, dblock=10)
CONTEXT = [1, 20, 21, 3, 22, 4, 23, 8]


@pytest.fixture(scope="module")
def model():
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=40, max_position=64, init_std=0.5
    )
    model = Transformer(config).eval()
    initialize_parameters(model.named_parameters(), config, 3)
    return model


@pytest.fixture(scope="module", params=[None, *BLOCK_POSITIONS])
def any_model(request, model):
    """GLM, and rotary models with GLM-4's layers and each way of the positions in spans."""
    if request.param is None:
        return model
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=40, max_position=64, init_std=0.5,
        positions="rotary", block_positions=request.param, rotary_share=0.5, num_key_value_heads=2, ffn="gated",
        tie_word_embeddings=False,
    )  # fmt: skip
    rotary = Transformer(config).eval()
    initialize_parameters(rotary.named_parameters(), config, 3)
    return rotary


def uncached_logits(model, context, spans):
    """Logits of the row [A | sop span | sop span] in one pass, as in training. spans: [(mask position, tokens)]."""
    part_b = [
        (token, position, i)
        for position, span in spans
        for i, token in enumerate([SPECIAL.sop, *span], start=1)
    ]
    length = len(context) + len(part_b)
    row = np.zeros((1, len(FIELDS), length), np.int32)
    row[0, TOKENS] = [*context, *(t for t, _, _ in part_b)]
    row[0, POSITION_IDS] = [*range(len(context)), *(p for _, p, _ in part_b)]
    row[0, BLOCK_POSITION_IDS] = [*[0] * len(context), *(i for _, _, i in part_b)]
    row[0, ORD] = [*[0] * len(context), *range(1, len(part_b) + 1)]
    row[0, DOC] = 0
    row[0, WEIGHTS].view(np.float32)[len(context) :] = 1.0
    inputs = MicroBatch.from_batch(Batch(row), torch.device("cpu"), model.config, kernel="dense")
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    return model.logits(hidden[len(context) :])


@torch.no_grad()
def test_cached_and_uncached_logits_agree(any_model):
    model = any_model
    filler = BlankFiller(model, SPECIAL, GenerationConfig())
    spans = [(3, [30, 31, 32]), (5, [33])]
    plan = filler.encoded([CONTEXT])
    cached = [
        filler.write(plan, [[t]], [p], i)[0, -1]
        for p, span in spans
        for i, t in enumerate([SPECIAL.sop, *span], start=1)
    ]
    expected = uncached_logits(model, CONTEXT, spans)
    # The same spans of a text in a batch with a longer one, each in one pass.
    plan = filler.encoded([CONTEXT, [*CONTEXT, 24, 25]])
    together = [filler.write(plan, [[SPECIAL.sop, *span], [SPECIAL.sop]], [p, p])[0] for p, span in spans]
    largest = expected.abs().max().item()  # fp32, of order 10
    torch.testing.assert_close(torch.cat(together), torch.stack(cached), rtol=0, atol=1e-5 * largest)
    # fp32: one query row at a time sums in another order than a block of rows; logits are of order 10.
    torch.testing.assert_close(torch.stack(cached), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_greedy_is_the_argmax_of_the_uncached_model(any_model):
    model = any_model
    spans = BlankFiller(model, SPECIAL, GenerationConfig(max_length=6)).fill(CONTEXT)
    assert len(spans) == 2
    done = []
    banned = torch.tensor(BlankFiller(model, SPECIAL, GenerationConfig()).search.banned)
    for position, span in zip((3, 5), spans, strict=True):
        expected = []
        while len(expected) < 6:
            logits = uncached_logits(model, CONTEXT, [*done, (position, expected)])[-1]
            token = int(logits.index_fill(0, banned, float("-inf")).argmax())
            if token in (SPECIAL.eop, SPECIAL.eos):
                break
            expected.append(token)
        assert span == expected
        done.append((position, span))


@torch.no_grad()
def log_probability(model, span, ended):
    """Of a span's tokens, and of its end."""
    log_p = uncached_logits(model, [1, 20, 3, 8], [(2, span)]).float().log_softmax(-1)
    total = sum(log_p[i, t].item() for i, t in enumerate(span))
    return total + max(log_p[len(span), 7].item(), log_p[len(span), 8].item()) if ended else total


def test_beam_search_finds_the_best_of_all_short_spans(model):
    """With as many beams as hypotheses the search is exhaustive: compare with enumeration of spans up to two tokens."""
    tokens = list(range(11, 40))
    whole = [[], *([a] for a in tokens)]
    cut = [[a, b] for a in tokens for b in tokens]  # at the limit
    probabilities = {
        tuple(span): (log_probability(model, span, ended), len(span) + ended)
        for ended, spans in ((True, whole), (False, cut))
        for span in spans
    }
    for penalty in (0.0, 1.0, 3.0):
        config = GenerationConfig(strategy="beam", num_beams=1000, max_length=2, length_penalty=penalty)
        (found,) = BlankFiller(model, SPECIAL, config).fill([1, 20, 3, 8])
        scores = {span: total / length**penalty for span, (total, length) in probabilities.items()}
        assert scores[tuple(found)] == pytest.approx(max(scores.values()), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_length": 3, "no_repeat_ngram_size": 2},
        {"strategy": "sample"},
        {"strategy": "beam", "num_beams": 3, "length_penalty": -1.0},
    ],
    ids=str,
)
def test_several_texts_are_filled_as_if_alone(any_model, options):
    """Of different lengths and numbers of blanks; draws follow from the number of the text."""
    contexts = [CONTEXT, [1, 3, 30, 8], [1, 20, 5], [1, 3, 4, 3, 22, 23, 24, 25, 26, 8], [1, 21, 3, 4, 8]]
    config = GenerationConfig(max_length=16, **options)
    together = BlankFiller(any_model, SPECIAL, config).fill_all(contexts)
    filler = BlankFiller(any_model, SPECIAL, config)
    assert together == [filler.fill(context) for context in contexts]
    assert [len(spans) for spans in together] == [2, 1, 1, 3, 2]
    assert len({len(span) for spans in together for span in spans}) > 1 or options.get("min_length")


def test_texts_are_taken_in_parts_where_memory_is_short(model, monkeypatch):
    contexts = [[1, 20 + i, 3, 8] for i in range(5)]
    filler = BlankFiller(model, SPECIAL, GenerationConfig(max_length=4))
    sizes, encoded = [], filler.encoded
    filler.encoded = lambda part: sizes.append(len(part)) or encoded(part)
    whole = filler.fill_all(contexts)
    row_bytes = 4 * (2 * 2 * 32 * (4 + 4) + 4 * 40)  # keys and values of text and answer, and logits
    monkeypatch.setattr("megatron_lite.inference.memory.MAX_BYTES", 2 * row_bytes)
    assert filler.fill_all(contexts) == whole and sizes == [5, 2, 2, 1]


class Pieces:
    """A tokenizer of byte level: white space is a token."""

    def decode(self, tokens):
        return "".join([" ", "\n\n", " word", "s"][token] for token in tokens)


@pytest.mark.parametrize(
    "span, shown",
    [([2, 3], "words"), ([], "(nothing)"), ([0], "(space)"), ([0, 1], "(line break)"), ([1, 2], "word")],
)
def test_an_answer_that_shows_nothing_says_what_it_is(span, shown):
    assert span_text(Pieces(), span) == shown


def test_answers_are_the_likeliest_spans_with_their_probabilities(model):
    """Against an enumeration of all spans of up to two tokens; a span may end with eop and with eos."""
    config = GenerationConfig(strategy="beam", num_beams=1024, length_penalty=0.0, max_length=3)
    (answers,) = BlankFiller(model, SPECIAL, config).ranked_spans([1, 20, 3, 8])
    tokens = list(range(11, 40))
    candidates = [[], *([a] for a in tokens), *([a, b] for a in tokens for b in tokens)]
    expected = {tuple(span): both_ends(model, span) for span in candidates}
    found = {tuple(span): p for p, span in answers if len(span) <= 2}
    assert len(found) == sum(len(span) <= 2 for _, span in answers)  # none twice
    assert [p for p, _ in answers] == sorted((p for p, _ in answers), reverse=True)
    best = sorted(expected, key=expected.__getitem__, reverse=True)[:3]
    assert [found[span] for span in best] == pytest.approx([expected[span] for span in best], rel=1e-4)


@torch.no_grad()
def test_later_answers_see_the_best_of_earlier_blanks(model):
    config = GenerationConfig(strategy="beam", num_beams=4, length_penalty=0.0, max_length=3)
    (first, *_), (second, *_) = BlankFiller(model, SPECIAL, config).ranked_spans(CONTEXT)
    spans = [(3, first[1]), (5, second[1])]
    p = uncached_logits(model, CONTEXT, spans)[len(first[1]) + 1 :].softmax(-1)
    expected = np.prod([p[i, t].item() for i, t in enumerate(second[1])])
    assert second == (pytest.approx(expected, rel=1e-4), second[1]) and len(second[1]) == 3  # none ended


@torch.no_grad()
def both_ends(model, span):
    logits = uncached_logits(model, [1, 20, 3, 8], [(2, span)]).float()
    p = logits.softmax(-1)
    return float(np.prod([p[i, t].item() for i, t in enumerate(span)]) * (p[len(span), 7] + p[len(span), 8]))


def test_beams_continue_from_the_chosen_span(model):
    """The second blank sees the first one's answer: with one beam, beam search is greedy."""
    greedy = BlankFiller(model, SPECIAL, GenerationConfig(max_length=5)).fill(CONTEXT)
    beam = BlankFiller(
        model, SPECIAL, GenerationConfig(strategy="beam", num_beams=1, max_length=5, length_penalty=0.0)
    ).fill(CONTEXT)
    if len(greedy[0]) < 5 and len(greedy[1]) < 5:
        assert beam == greedy
    wide = BlankFiller(model, SPECIAL, GenerationConfig(strategy="beam", num_beams=8, max_length=5)).fill(
        CONTEXT
    )
    assert len(wide) == 2


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned_blocks", "rotary"])
def test_no_two_tokens_share_the_last_block_position(positions):
    """A span that is cut where block positions end has none for its last token, which later blanks then do not see."""
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=40, max_position=7, init_std=0.5,
        positions=positions,
    )  # fmt: skip
    model = Transformer(config).eval()
    initialize_parameters(model.named_parameters(), config, 3)
    filler = BlankFiller(model, SPECIAL, GenerationConfig(max_length=9, min_length=8))
    first, second = filler.hypotheses([CONTEXT])[0]
    assert len(first[0].tokens) == len(second[0].tokens) == 7 and not first[0].ended
    spans = [(3, first[0].tokens[:6]), (5, second[0].tokens[:6])]
    expected = uncached_logits(model, CONTEXT, spans).split(7)
    banned = [*filler.search.banned, SPECIAL.eop, SPECIAL.eos]
    free = [logits.index_fill(1, torch.tensor(banned), float("-inf")) for logits in expected]
    assert [logits.argmax(1).tolist() for logits in free] == [first[0].tokens, second[0].tokens]
    replay = filler.replay(CONTEXT, [first[0], second[0]])
    for logits, wanted in zip(replay.logits, expected, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    queries, keys = replay.tokens["encoder"]
    assert len(queries) == len(keys) == len(CONTEXT) + 2 * 7 and queries[-1].predicts


def test_sampling_is_reproducible_and_obeys_top_k_and_top_p(model):
    def draws(**options):
        config = GenerationConfig(strategy="sample", max_length=8, temperature=2.0, **options)
        return [
            BlankFiller(model, SPECIAL, dataclasses.replace(config, seed=s)).fill(CONTEXT) for s in range(8)
        ]

    free = draws()
    assert free == draws() and len({str(x) for x in free}) > 1
    greedy = BlankFiller(model, SPECIAL, GenerationConfig(max_length=8)).fill(CONTEXT)
    assert draws(top_k=1) == draws(top_p=1e-6) == [greedy] * 8
    assert not {t for spans in free for span in spans for t in span} & set(
        BlankFiller(model, SPECIAL, GenerationConfig()).search.banned
    )


@torch.no_grad()
def test_top_p_keeps_the_smallest_sufficient_set(model):
    filler = BlankFiller(model, SPECIAL, GenerationConfig(strategy="sample", top_p=0.7))
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert {filler.search.draw(logits, None) for _ in range(200)} == {0, 1}


def test_contexts_and_cuts():
    assert blank_context([20, 3, 21], SPECIAL) == [1, 20, 3, 21, 8]
    assert blank_context([20, 5], SPECIAL) == [1, 20, 5]  # to be continued: no eos
    assert insert_spans([20, 3, 21, 4], [[30], [31, 32]], SPECIAL) == [[20], [30], [21], [31, 32], []]


def test_unusable_texts_are_refused(model):
    filler = BlankFiller(model, SPECIAL, GenerationConfig())
    with pytest.raises(DataError, match="no blank"):
        filler.fill([1, 20, 8])
    with pytest.raises(DataError, match="shorten"):
        filler.fill([1, *[20] * 70, 3, 8])


def test_a_model_with_a_decoder_fills_no_blanks():
    checkpoint = SimpleNamespace(path=Path("runs/two"), state={"consumed_samples": 8}, step=1)
    run = OpenRun(tiny("model.decoder_layers=3"), SimpleNamespace(), checkpoint)
    with pytest.raises(ConfigError, match=r"runs/two has model.decoder_layers 3"):
        run.require_blank_infilling(["[MASK]"])
