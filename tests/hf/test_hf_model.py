"""The transformers model against the training model: logits, dropout, padding, cache, generation, heads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.hf.hf_runs import make_config, make_model, tree, write_vocabulary
from support.transformer.batches import prefix_batch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, GRP, ORD, POSITION_IDS, TOKENS
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.model import BLOCK_POSITIONS
from megatron_lite.hf.glm.modeling_glm import (
    GLMForBlankInfilling,
    GLMForMultipleChoice,
    GLMForSequenceClassification,
    GLMModel,
    visible_keys,
)
from megatron_lite.hf.glm.own_format import generation_config, glm_config
from megatron_lite.hf.glm.pipeline_glm import BlankInfillingPipeline
from megatron_lite.hf.glm.tokenization_glm import GLMTokenizerFast
from megatron_lite.hf.glm.tokenizer_files import write_tokenizer
from megatron_lite.hf.published.verify_inputs import our_output
from megatron_lite.inference.filling import BlankFiller, blank_context
from megatron_lite.inference.filling import GenerationConfig as TrainingGeneration
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.kernels import dropout
from megatron_lite.transformer.micro_batch import MicroBatch

# fp32: the same sums in another order; logits are of order 1.
TOLERANCE = {"rtol": 0, "atol": 1e-5}


MODERN = {
    "positions": "rotary", "block_positions": "halves", "rms_norm": True, "ffn": "gated", "ffn_size": 40,
    "biases": "none", "activation": "gelu_erf",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hf"))


LOCAL = {**MODERN, "attention_window": 5, "global_every": 2, "rotary_base_local": 50.0, "num_layers": 3}


@pytest.fixture(scope="module", params=[None, *BLOCK_POSITIONS, "modern", "local"])
def made_with(request, made, tmp_path_factory):
    """The same with each kind of positions, with modern blocks, and with local layers among them."""
    if request.param in ("modern", "local"):
        return make(tmp_path_factory.mktemp("hf"), **(LOCAL if request.param == "local" else MODERN))
    rotary = {
        "positions": "rotary",
        "block_positions": request.param,
        "rotary_share": 0.5,
        "rotary_base": 100.0,
    }
    return made if request.param is None else make(tmp_path_factory.mktemp("hf"), **rotary)


def make(directory, **model):
    """Training model, transformers model with its weights, training tokenizer, transformers tokenizer."""
    rates = {"embedding_dropout": 0.1, "attention_dropout": 0.2, "output_dropout": 0.3}
    config = make_config(tree(write_vocabulary(directory), **rates, **model))
    tokenizer = load_tokenizer(config.tokenizer)
    ours = make_model(config)
    theirs = GLMForBlankInfilling(glm_config(config.model, tokenizer.special, torch.float32)).eval()
    copy_weights(ours, theirs)
    theirs.generation_config = generation_config(tokenizer.special)
    write_tokenizer(tokenizer, directory / "tokenizer", config.model.max_position + 1)
    return ours, theirs, tokenizer, GLMTokenizerFast.from_pretrained(directory / "tokenizer")


def copy_weights(ours, theirs):
    state = {f"glm.{name}": parameter.detach() for name, parameter in ours.named_parameters()}
    words = "glm.embedding.word_embeddings.weight"
    state[words] = state[words][: ours.config.vocab_size]
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all("glm" not in name for name in missing)


def tensors(batch, *fields):
    return [torch.from_numpy(batch[:, field].astype(np.int64)) for field in fields]


def run(model, batch, mask=None):
    tokens, positions, block_positions, doc = tensors(batch, TOKENS, POSITION_IDS, BLOCK_POSITION_IDS, DOC)
    mask = (doc >= 0).long() if mask is None else mask
    return model(
        tokens, attention_mask=mask, position_ids=positions, block_position_ids=block_positions
    ).logits


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_logits_agree_on_padding_too(made_with, seed):
    ours, theirs, *_ = made_with
    batch = prefix_batch(seed, rows=4, length=48, vocab=60, documents=1)
    assert (batch[:, DOC] < 0).any()
    torch.testing.assert_close(run(theirs, batch), our_output(ours, batch)[1], **TOLERANCE)


@torch.no_grad()
def test_packed_documents_go_through_a_mask_of_pairs(made):
    ours, theirs, *_ = made
    batch = prefix_batch(5, rows=2, length=48, vocab=60, documents=3)
    mask = allowed(batch[:, DOC], batch[:, ORD], batch[:, GRP])
    logits = run(theirs, batch, torch.from_numpy(mask)[:, None])
    torch.testing.assert_close(logits, our_output(ours, batch)[1], **TOLERANCE)


@torch.no_grad()
def test_dropout_is_applied_at_the_same_positions(made, monkeypatch):
    """With all elements kept, but divided by 1 - p, the models agree only if each has its place and rate."""
    ours, theirs, *_ = made
    batch = prefix_batch(6, rows=2, length=32, vocab=60, documents=1)
    attention = F.scaled_dot_product_attention

    def scaled_attention(q, k, v, attn_mask=None, dropout_p=0.0):
        return attention(q, k, v, attn_mask=attn_mask) / (1 - dropout_p)

    def scaled(x, p=0.5, training=True, inplace=False):
        return x / (1 - p) if training else x

    without = our_output(ours, batch)[1]
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_attention)
    monkeypatch.setattr(F, "dropout", scaled)
    inputs = MicroBatch.from_batch(
        Batch(batch), torch.device("cpu"), ours.config, kernel="dense", dropout_seed=1
    )
    monkeypatch.setattr(
        dropout,
        "keep_features",
        lambda keys, salt, width, p: torch.ones(len(keys), width, dtype=torch.bool),
    )
    monkeypatch.setattr(
        dropout.AttentionDropout,
        "keep",
        lambda self, queries, keys, heads: torch.ones(heads, len(queries), len(keys), dtype=torch.bool),
    )
    hidden = ours.run(inputs.tokens, inputs.ids, inputs.plan, inputs.dropout)
    expected = ours.logits(hidden).view(*batch[:, DOC].shape, -1)
    theirs.train()
    actual = run(theirs, batch)
    theirs.eval()
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert (expected - without).abs().max() > 0.01


def test_the_visibility_rule_by_hand():
    blocks = torch.tensor([[0, 0, 1, 2, 1]])
    expected = torch.tensor(
        [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        dtype=torch.bool,
    )
    assert torch.equal(visible_keys(blocks, None, 5, 0)[0, 0], expected)
    # The last two as new tokens on a cache of three whose first is padding.
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    new = visible_keys(blocks[:, 3:], mask, 2, 3)[0, 0]
    assert torch.equal(new, torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool))
    assert visible_keys(blocks[:, 4:], None, 1, 4) is None
    with pytest.raises(ValueError, match="attention_mask has 2 columns"):
        visible_keys(blocks, torch.ones(1, 2), 5, 0)


TEXTS = [
    "word1 word2 [MASK] word3 . [sMASK] word4",
    "word9 word8 word7 word6 word5 word4 [MASK]",
    "word3 [gMASK]",
]


def our_spans(ours, tokenizer, text, length):
    filler = BlankFiller(ours, tokenizer.special, TrainingGeneration(max_length=length))
    return filler.fill(blank_context(tokenizer.encode_with_specials(text), tokenizer.special))


def new_tokens(theirs, inputs, **options):
    written = theirs.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    ends = theirs.generation_config.eos_token_id
    return [[t for i, t in enumerate(row) if not set(row[: i + 1]) & set(ends)] for row in written.tolist()]


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation_matches_the_training_model(made_with, use_cache):
    """A padded batch of texts, and then the second blank of the first text, given its first answer."""
    ours, theirs, tokenizer, fast = made_with
    inputs = fast.build_inputs_for_generation(fast(TEXTS, padding=True))
    expected = [our_spans(ours, tokenizer, text, 8) for text in TEXTS]
    assert new_tokens(theirs, inputs, max_new_tokens=8, use_cache=use_cache) == [
        spans[0] for spans in expected
    ]
    if ours.embedding.block_position_embeddings is not None:  # some span ends by itself, see `make_model`
        assert any(0 < len(spans[0]) < 8 for spans in expected)
    second = fast.build_inputs_for_generation(fast(TEXTS[:1]), [expected[0][:1]])
    assert new_tokens(theirs, second, max_new_tokens=8, use_cache=use_cache) == [expected[0][1]]


@torch.no_grad()
def test_cached_steps_give_the_logits_of_one_pass(made_with):
    _, theirs, _, fast = made_with
    inputs = fast.build_inputs_for_training(fast(TEXTS[:1]), [["word5 word6", "word7"]])
    labels = inputs.pop("labels")
    whole = theirs(**inputs).logits
    start = int((labels == -100).sum())
    cache, steps = None, []
    for first, last in [(0, start), *((i, i + 1) for i in range(start, labels.shape[1]))]:
        part = {k: v[:, first:last] for k, v in inputs.items() if k != "attention_mask"}
        keys = inputs["position_ids"][:, :last]
        out = theirs(**part, past_key_values=cache, use_cache=True, key_position_ids=keys)
        cache = out.past_key_values
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, **TOLERANCE)
    if theirs.config.attention_window:
        with pytest.raises(ValueError, match="local layers need key_position_ids"):
            theirs(**part, past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_what_an_encoder_keeps_has_its_positions(tmp_path):
    """Local layers of the encoder alone, with a cache: positions follow from the mask, padding before a text too."""
    _, theirs, *_ = make(tmp_path, **LOCAL)
    tokens, mask = torch.arange(7, 67).view(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, :8] = 0
    first = theirs(tokens[:, :29], attention_mask=mask[:, :29], use_cache=True)
    last = theirs(tokens[:, 29:], attention_mask=mask, past_key_values=first.past_key_values)
    every = torch.ones(2, 1, 30, 30, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    every[:, :, :29, :29] = mask[:, :29].bool()[:, None, :, None] & mask[:, :29].bool()[:, None, None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = theirs(tokens, attention_mask=every, position_ids=positions).logits
    torch.testing.assert_close(last.logits[:, 0], whole[:, 29], **TOLERANCE)


class NoRepeat:
    """A processor of transformers' that blocks n-grams of the answer; its own one counts the text and padding too."""

    def __init__(self, size, start):
        self.size, self.start = size, start

    def __call__(self, input_ids, scores):
        for row, tokens in enumerate(input_ids[:, self.start :].tolist()):
            grams = [tuple(tokens[i : i + self.size]) for i in range(len(tokens) - self.size + 1)]
            tail = tuple(tokens[len(tokens) - self.size + 1 :])
            for gram in grams:
                if gram[:-1] == tail:
                    scores[row, gram[-1]] = float("-inf")
        return scores


GENERATION = [
    {},
    {"min_length": 6},
    {"no_repeat_ngram_size": 2},
    {"strategy": "beam", "num_beams": 4, "length_penalty": 0.0},
    {"strategy": "beam", "num_beams": 3, "length_penalty": 1.0, "min_length": 4},
    {"strategy": "beam", "num_beams": 5, "length_penalty": 2.0, "no_repeat_ngram_size": 2},
    {"strategy": "beam", "num_beams": 5, "length_penalty": -0.5, "min_length": 3, "no_repeat_ngram_size": 1},
]


@torch.no_grad()
@pytest.mark.parametrize("options", GENERATION, ids=str)
def test_generation_agrees_token_for_token(made, options):
    """Batches of padded texts on both sides, and each text alone here."""
    ours, theirs, tokenizer, fast = made
    config = TrainingGeneration(max_length=8, **options)
    texts = [
        f"{text} word{i} [MASK] word{j}"
        for i, j, text in [(1, 2, ""), (3, 9, "word4 ."), (5, 6, "word7 word8 word2")]
    ]
    contexts = [blank_context(tokenizer.encode_with_specials(text), tokenizer.special) for text in texts]
    found = [spans[0] for spans in BlankFiller(ours, tokenizer.special, config).fill_all(contexts)]
    assert found == [BlankFiller(ours, tokenizer.special, config).fill(context)[0] for context in contexts]
    inputs = fast.build_inputs_for_generation(fast(texts, padding=True))
    more = {"num_beams": config.num_beams, "length_penalty": config.length_penalty}
    more = more if config.strategy == "beam" else {}
    if config.no_repeat_ngram_size:
        more["logits_processor"] = [NoRepeat(config.no_repeat_ngram_size, inputs["input_ids"].shape[1])]
    if config.min_length:
        more["min_new_tokens"] = config.min_length
    assert new_tokens(theirs, inputs, max_new_tokens=8, **more) == found
    assert all(len(span) >= config.min_length for span in found)


def raw_score(theirs, inputs, tokens):
    """Mean log probability of `tokens` after a prompt, from one uncached pass; beam search's own measure."""
    steps = torch.arange(1, len(tokens))
    row = {name: value[0] for name, value in inputs.items()}
    appended = {
        "input_ids": torch.tensor(tokens[:-1]),
        "position_ids": row["position_ids"][-1].expand(len(steps)),
        "block_position_ids": 1 + steps,
    }
    logits = theirs(**{name: torch.cat([row[name], more])[None] for name, more in appended.items()}).logits
    log_p = logits[0, -len(tokens) :].float().log_softmax(-1)
    return log_p.gather(-1, torch.tensor(tokens)[:, None]).mean().item()


@torch.no_grad()
def test_beam_search_scores_match_the_model(made):
    _, theirs, _, fast = made
    inputs = fast.build_inputs_for_generation(fast(TEXTS[:1]))
    start = inputs["input_ids"].shape[1]
    wide = theirs.generate(
        **inputs, max_new_tokens=3, num_beams=200, return_dict_in_generate=True, output_scores=True
    )
    greedy = theirs.generate(**inputs, max_new_tokens=3)[0, start:].tolist()
    found = [t for t in wide.sequences[0, start:].tolist() if t != theirs.config.pad_token_id]
    assert wide.sequences_scores[0].item() == pytest.approx(raw_score(theirs, inputs, found), abs=1e-5)
    assert raw_score(theirs, inputs, found) >= raw_score(theirs, inputs, greedy)
    padded = fast.build_inputs_for_generation(fast(TEXTS, padding=True))
    beams = theirs.generate(**padded, max_new_tokens=5, num_beams=4)
    for i, text in enumerate(TEXTS):
        single = fast.build_inputs_for_generation(fast([text]))
        alone = theirs.generate(**single, max_new_tokens=5, num_beams=4)[
            0, single["input_ids"].shape[1] :
        ].tolist()
        assert beams[i, padded["input_ids"].shape[1] :].tolist()[: len(alone)] == alone


@torch.no_grad()
def test_sampling_draws_no_special_token(made):
    _, theirs, _, fast = made
    inputs = fast.build_inputs_for_generation(fast(TEXTS, padding=True))
    torch.manual_seed(0)
    drawn = theirs.generate(
        **inputs, max_new_tokens=5, do_sample=True, temperature=2.0, num_return_sequences=6
    )
    assert drawn.shape[0] == 6 * len(TEXTS) and len({str(row) for row in drawn[:6].tolist()}) > 1
    new = drawn[:, inputs["input_ids"].shape[1] :].flatten().tolist()
    assert not set(theirs.generation_config.suppress_tokens) & set(new)


def test_unusable_input_of_generate_is_refused(made):
    _, theirs, _, fast = made
    with pytest.raises(ValueError, match="build_inputs_for_generation"):
        theirs.generate(**fast("word1 [MASK]", return_tensors="pt"))
    inputs = fast.build_inputs_for_generation(fast(["word1 [MASK]"]))
    with pytest.raises(ValueError, match="block positions end at 64"):
        theirs.generate(**inputs, max_new_tokens=65)
    with pytest.raises(ValueError, match="dynamic caches"):
        theirs.generate(**inputs, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="a span has the position of its blank"):
        theirs(inputs["input_ids"], block_position_ids=inputs["block_position_ids"])
    too_long = fast(["word1 " * 70 + "[MASK]", "word1"], padding=True, return_tensors="pt")
    with pytest.raises(
        ValueError, match=r"has 73 tokens with \[CLS\].* positions for 65; shorten it by 8 tokens"
    ):
        fast.build_inputs_for_generation(too_long)
    fill = BlankInfillingPipeline(model=theirs, tokenizer=fast)
    with pytest.raises(ValueError, match="positions for 65; shorten"):
        fill("word1 " * 70 + "[MASK]")
    for mask in ({}, {"attention_mask": too_long["attention_mask"]}):
        with pytest.raises(ValueError, match="a text has 73 tokens, but the model has positions for 65"):
            theirs.glm(too_long["input_ids"], **mask)
    short = {name: x[1:] for name, x in too_long.items()}  # 70 columns of padding are no text
    assert theirs.glm(**short).last_hidden_state.isfinite().all()


@torch.no_grad()
def test_the_encoder_does_not_see_padding(made):
    _, theirs, _, fast = made
    alone = theirs.glm(**fast(TEXTS[2], return_tensors="pt")).last_hidden_state
    batch = fast(TEXTS, padding=True, return_tensors="pt")
    together = theirs.glm(**batch, output_hidden_states=True)
    torch.testing.assert_close(together.last_hidden_state[2:, -alone.shape[1] :], alone, **TOLERANCE)
    assert len(together.hidden_states) == 3


def test_the_loss_matches_the_labels(made):
    _, theirs, _, fast = made
    inputs = fast.build_inputs_for_training(fast(TEXTS[:2], padding=True), [["word5 word6", "word7"], ["."]])
    out = theirs(**inputs)
    rows = inputs["labels"] != -100
    assert rows.sum() == 3 + 2 + 2
    expected = torch.nn.functional.cross_entropy(out.logits[rows], inputs["labels"][rows])
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(p.grad is not None for p in theirs.glm.parameters())
    theirs.zero_grad()


def test_gradient_checkpointing_changes_no_gradient(made):
    _, theirs, _, fast = made
    inputs = fast.build_inputs_for_training(fast(TEXTS[:1]), [["word5", "word7"]])
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            theirs.gradient_checkpointing_enable()
        theirs.train()
        torch.manual_seed(0)
        theirs(**inputs).loss.backward()
        gradients.append(theirs.glm.layers[0].mlp.dense_h_to_4h.weight.grad.clone())
        theirs.zero_grad()
    theirs.gradient_checkpointing_disable()
    theirs.eval()
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0


@torch.no_grad()
def test_multiple_choice_sums_log_probabilities(made):
    ours, theirs, _, fast = made
    model = GLMForMultipleChoice(theirs.config).eval()
    copy_weights(ours, model)
    texts, choices = TEXTS[1:], [["word1 word2", "word3"], [".", "word4 word5 word6"]]
    inputs = fast.build_inputs_for_multiple_choice(fast(texts, padding=True), choices)
    out = model(**inputs, labels=torch.tensor([0, 1]))
    for i, (text, options) in enumerate(zip(texts, choices, strict=True)):
        for j, option in enumerate(options):
            single = fast.build_inputs_for_training(fast([text]), [[option]])
            labels = single.pop("labels")
            log_p = theirs(**single).logits.log_softmax(-1)[labels != -100]
            score = log_p.gather(-1, labels[labels != -100][:, None]).sum()
            torch.testing.assert_close(out.logits[i, j], score, rtol=0, atol=1e-4)  # sums of up to 4 logits
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 1])))


@pytest.mark.parametrize("num_labels, labels", [(3, [0, 2, 1]), (1, [0.5, 1.0, 2.0]), (2, [[0.0, 1.0]] * 3)])
def test_sequence_classification_learns(made, num_labels, labels):
    ours, _, _, fast = made
    config = glm_config(ours.config, made[2].special, torch.float32)
    config.num_labels = num_labels
    model = GLMForSequenceClassification(config).eval()
    copy_weights(ours, model)
    inputs = fast(TEXTS, padding=True, return_tensors="pt")
    alone = model(**fast(TEXTS[2], return_tensors="pt")).logits
    out = model(**inputs, labels=torch.tensor(labels))
    torch.testing.assert_close(out.logits[2:], alone, **TOLERANCE)  # [CLS] is found behind the padding
    before = out.loss.item()
    optimizer = torch.optim.SGD(model.score.parameters(), lr=0.005)
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(**inputs, labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < before


def test_initial_weights_follow_the_training_scheme(made):
    config = glm_config(made[0].config, made[2].special, torch.float32)
    config.num_layers, config.initializer_range = 8, 0.02
    model = GLMModel(config)
    layer = model.layers[0]
    # Standard deviations of at least 1024 draws: 5 standard errors are 11 %.
    assert layer.mlp.dense_h_to_4h.weight.std().item() == pytest.approx(0.02, rel=0.11)
    assert layer.attention.dense.weight.std().item() == pytest.approx(0.02 / 4, rel=0.11)
    assert layer.mlp.dense_4h_to_h.weight.std().item() == pytest.approx(0.02 / 4, rel=0.11)
    assert layer.input_layernorm.weight.eq(1).all() and layer.attention.dense.bias.eq(0).all()
