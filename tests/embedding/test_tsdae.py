"""TSDAE: a decoder writes a text from its one vector, as loops over transformers' T5 compute it, in any layout."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.data.recipes import SPECIAL, make, text_of
from support.distributed import run_ranks
from support.hf.published import write_random
from support.project import small_run
from support.selection import slow_but
from support.training.training import fit, records

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.batch_fields import DOC, ORD, TARGETS, TOKENS, WEIGHTS
from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.systems import with_objective
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.models.tsdae import DenoisingBatch
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

NUMBER = LOSS_NAMES.index("tsdae")
CPU = torch.device("cpu")


# What the objective writes


def kept_words(encoder: list[int], text: list[int]) -> list[int]:
    """The tokens of a text, all distinct, that the encoder reads; in the text's order."""
    *words, end = encoder
    assert end == SPECIAL.eos and words == [token for token in text if token in words]
    return words


def test_the_decoder_writes_the_whole_text_and_the_encoder_reads_some_words_of_it():
    """Words of 1 to 2 tokens are kept or deleted as a whole; the decoder sees one token of the encoder."""
    text = text_of(60, with_eos=False).tolist()
    starts = [i for i, token in enumerate(text) if token % 3 != 2]
    words = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    made, kept = make("tsdae", 60), []
    for sample in range(200):
        example = made.example(np.array([*text, SPECIAL.eos], np.int32)[:60], sample)
        encoder, decoder = example.ord <= 0, example.ord > 0
        left = kept_words(example.tokens[encoder].tolist(), text)
        found = [word for word in words if word[0] in left]
        assert left == [token for word in found for token in word]
        kept.append(len(found) / len(words))
        assert example.targets[decoder].tolist() == [*text, SPECIAL.eos]
        assert example.tokens[decoder].tolist() == [SPECIAL.sop, *text]
        assert example.weights.tolist() == decoder.astype(float).tolist()
        assert example.position_ids.tolist() == [*range(encoder.sum()), *range(decoder.sum())]
        assert (example.ord == 0).sum() == 1 and example.tokens[example.ord == 0] == SPECIAL.eos
        assert example.ord[decoder].tolist() == list(range(1, decoder.sum() + 1))
    # 200 samples of 40 words: four standard deviations of the mean.
    assert abs(np.mean(kept) - 0.4) < 4 * (0.24 / 8000) ** 0.5
    assert (
        len(
            {tuple(kept_words(made.example(np.array(text), i).tokens[:-61].tolist(), text)) for i in range(9)}
        )
        == 9
    )


@pytest.mark.parametrize(("ratio", "left"), [(0.0, 30), (1.0, 1)])
def test_all_or_one_word_may_be_left(ratio, left):
    text = text_of(30, with_eos=False)
    made = make("tsdae", 30, deleted_ratio=ratio, whole_words=False)
    chosen = [kept_words(each.tokens[each.ord <= 0].tolist(), text.tolist()) for each in examples(made, text)]
    assert {len(words) for words in chosen} == {left}
    assert left > 1 or len({words[0] for words in chosen}) > 15  # any word may be it


def examples(made, text, count: int = 60):
    return [made.example(text, sample) for sample in range(count)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"system": "bert"}}, "tsdae.form is bert, .* encoder and a decoder .* contrastive"),
        (
            {"model": {"decoder_layers": 0, "system": None}, "tsdae": {"form": "t5"}},
            "model.decoder_layers is 0",
        ),
        ({"objectives": {"t5": 1.0}}, "objectives has tsdae, t5; .* alone"),
        ({"data": {"short_prob": 0.1}}, "data.short_prob is 0.1"),
    ],
)
def test_what_has_no_decoder_or_other_samples_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(Config, with_objective(merge(tree_of(Layout()), changes)))


# The loss


TEXTS = [[7, 9, 11], [5], [20, 21, 22, 23, 24, 25, 26, 27], [30, 31, 32, 33], [40, 41]]
ROWS = [[0, 1, 2], [3, 4]]  # texts of each sequence; the second has padding
EOS, SOP, CLS, VOCABULARY = 3, 4, 2, 97
IDS = {SPECIAL.eos: EOS, SPECIAL.sop: SOP, SPECIAL.cls: CLS}


def rows(texts=TEXTS, of_rows=ROWS, first_sample: int = 0, form: str = "t5") -> np.ndarray:
    """The fields of a batch of texts in a vocabulary of 97 tokens."""
    made = make("tsdae", 16, form=form, whole_words=False)
    chunks = [np.array(texts[number], np.int32) + 1000 for numbers in of_rows for number in numbers]
    lengths, counts = [np.array([len(each) for each in several]) for several in (chunks, of_rows)]
    samples = first_sample + np.arange(len(of_rows))
    fields = collate(made, np.concatenate(chunks), lengths, counts, samples)
    ids = np.zeros(3000, np.int32)
    ids[1000 : 1000 + VOCABULARY] = np.arange(VOCABULARY)
    ids[list(IDS)] = list(IDS.values())
    fields[:, [TOKENS, TARGETS]] = ids[fields[:, [TOKENS, TARGETS]]] * (fields[:, [DOC, DOC]] >= 0)
    return fields


def loaded(source) -> Transformer:
    """Our model with the weights of a directory, without dropout."""
    model = Transformer(
        build(ModelConfig, {**source.settings, "attention_dropout": 0.0}), num_losses=len(LOSS_NAMES)
    )
    weights = to_ours(source.theirs, source.mappings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            if name in weights.shapes:
                read = weights.read(name)
                parameter[: len(read)] = read  # rows that pad the vocabulary stay 0
    return model


def class_loss(theirs, fields: np.ndarray, pooling: str, form: str) -> torch.Tensor:
    """The sum of cross entropies of the texts, by loops: the encoder's vector of each is all that the decoder gets."""
    total = 0.0
    for row, numbers in enumerate(ROWS):
        for document, number in enumerate(numbers):
            mine = fields[row][:, fields[row, DOC] == document]
            read = torch.from_numpy(mine[TOKENS, mine[ORD] <= 0].astype(np.int64))[None]
            states = theirs.get_encoder()(input_ids=read).last_hidden_state[0]
            vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
            logits = theirs(
                encoder_outputs=(vector[None, None],),
                decoder_input_ids=torch.tensor([[SOP, *TEXTS[number]]]),
            ).logits[0]
            total = total + F.cross_entropy(logits, torch.tensor([*TEXTS[number], EOS]), reduction="sum")
    return total


@pytest.mark.parametrize(
    ("case", "pooling"),
    [("t5", "mean"), ("t5", "cls"), ("t5", "last"), ("mt5", "mean"), ("bart", "mean")],
)
def test_loss_and_gradients_equal_transformers(case, pooling, tmp_path):
    """From equal weights on the same deleted texts: the class gets the pooled vector as a sequence of length 1."""
    theirs = write_random(case, tmp_path)
    source = open_published(tmp_path)
    model = loaded(source)
    form = "bart" if case == "bart" else "t5"
    fields = rows(form=form)
    assert (fields[:, ORD] == -1).sum() > 3  # several tokens of a text are pooled
    batch = DenoisingBatch(fields, pooling=pooling)
    loss, _ = model(MicroBatch.from_batch(batch, CPU, model.config))
    expected = class_loss(theirs, fields, pooling, form)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    of_theirs = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in theirs.named_parameters(remove_duplicate=False)
    }
    expected_grads = to_ours(Weights(source.theirs.shapes, of_theirs.__getitem__), source.mappings)
    largest = max(grad.abs().max() for grad in of_theirs.values())
    for name, parameter in model.named_parameters():
        expected_grad = expected_grads.read(name)
        assert (parameter.grad[: len(expected_grad)] - expected_grad).abs().max() <= 1e-5 * largest, name
    # One key has all attention, so queries learn nothing.
    assert model.layers[-1].cross_attention.query.weight.grad.abs().max() <= 1e-5 * largest
    assert model.layers[0].attention.query_key_value.weight.grad.abs().max() > 1e-3 * largest


# Layouts


class Layout(NamedTuple):
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    size: int = 8  # of a micro-batch
    zero: int = 1
    sequence: bool = False
    system: str = "t5_1_1"  # smooth: a relu that flips changes the norm of gradients

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


SAMPLES, STEPS = 8, 3


def tree_of(layout: Layout) -> dict:
    """Two layers of encoder and decoder each, with dropout."""
    return {
        "model": {
            "system": layout.system, "num_layers": 2, "decoder_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
            "vocab_size": VOCABULARY, "max_position": 64,
        },
        "objectives": {"tsdae": 1.0},
        "data": {"sequence_length": 16},
        "training": {"steps": 10, "precision": "fp32"},
        "batch": {"micro_batch_size": layout.size, "global_batch_size": SAMPLES},
        "optimizer": {"clip_grad_norm": 0.5},
        "parallel": {
            "tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline,
            "sequence_parallel": layout.sequence, "zero_stage": layout.zero,
        },
    }  # fmt: skip


@functools.cache
def drawn(step: int) -> np.ndarray:
    """Eight sequences of one to three texts of unequal lengths."""
    generator = np.random.default_rng(step)
    texts = [generator.integers(5, VOCABULARY, generator.integers(1, 13)).tolist() for _ in range(17)]
    of_rows = np.split(np.arange(17), [3, 5, 6, 9, 11, 14, 16])
    return rows(texts, [numbers.tolist() for numbers in of_rows], SAMPLES * step)


def train(context, layout: Layout) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, and the loss of an evaluation at the end."""
    config = build(Config, with_objective(tree_of(layout)))
    engine = make_engine(config, context, len(LOSS_NAMES))
    found = []
    for step in range(STEPS):
        fields = drawn(step)
        count = float(fields[:, WEIGHTS].view(np.float32).sum())
        batches = [
            DenoisingBatch(fields[numbers], numbers, pooling="mean")
            for first in range(context.dp.rank * layout.size, SAMPLES, layout.size * layout.data)
            for numbers in [np.arange(first, first + layout.size)]
        ]
        engine.set_step(step + 1)
        micro_batches = [engine.prepared(batch, step, 1.0 / count) for batch in batches]
        result = engine.train_step(micro_batches, 1e-3)
        loss, weight, _ = context.sum_losses(result.objective_sums)[NUMBER].tolist()
        assert weight == count
        found.append((loss / weight, result.grad_norm))
    loss, weight, _ = context.sum_losses(engine.evaluate(batches))[NUMBER].tolist()
    return [*found, (loss / weight, weight)]


@functools.cache
def one_process(system: str) -> list[tuple[float, float]]:
    return run_ranks(train, 1, Layout(system=system))[0]


USUAL = [
    Layout(data=2, size=2, zero=2),
    Layout(pipeline=2, tensor=2, size=4, sequence=True),
    Layout(data=2, size=4, zero=3, system="bart"),
]
FURTHER = [
    Layout(size=2),
    Layout(tensor=2, size=4),
    Layout(tensor=2, data=2, size=4, sequence=True),
    Layout(pipeline=2, data=2, size=2),
    Layout(tensor=2, size=4, system="bart"),
    Layout(pipeline=2, size=4, system="bart"),
]


@pytest.mark.parametrize(
    "layout",
    slow_but(USUAL, USUAL + FURTHER),
    ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout._asdict().items()),
)
def test_layouts_equal_one_process(layout):
    parallel = ParallelConfig(tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
    for found in run_ranks(train, layout.ranks, layout, parallel=parallel):
        assert np.array(found) == pytest.approx(np.array(one_process(layout.system)), rel=1e-5)


def test_padding_of_an_evaluation_changes_nothing():
    """Ranks with fewer sequences than others compute padding."""
    batch = DenoisingBatch(rows(), pooling="mean")
    model = Transformer(build(Config, with_objective(tree_of(Layout()))).model, num_losses=len(LOSS_NAMES))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    losses = [
        model(MicroBatch.from_batch(each, CPU, model.config))[0].item() for each in (batch, batch.padded(5))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# Training, as users run it


def slots(rng) -> str:
    """Three words, each of eight of its own: what comes next is known, which word it is only from the vector."""
    return " ".join(f"word{8 * slot + rng.integers(8)}" for slot in range(3))


@pytest.mark.slow
def test_the_vector_carries_the_content(corpus, tmp_path):
    """The loss falls below the least of any decoder whose vector is the same for all texts."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": slots(rng)}) + "\n" for _ in range(2000)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt"))
    build_corpus(
        BuildConfig(inputs=[str(tmp_path / "texts.jsonl")], output=str(tmp_path / "texts")),
        functools.partial(load_tokenizer, tokenizer),
    )
    run = small_run(corpus, tmp_path / "run")
    del run["blank_infilling"]
    changes = {
        "model": {"system": "t5_1_1", "decoder_layers": 2},
        "objectives": {"tsdae": 1.0},
        "data": {"train": [{"prefix": str(tmp_path / "texts")}], "validation": [], "sequence_length": 16},
        "training": {"steps": 160},
        "batch": {"micro_batch_size": 4, "global_batch_size": 4},
        "optimizer": {"lr": 1e-2},
    }
    run_ranks(fit, 1, with_objective(merge(run, changes)))
    losses = [each["loss/tsdae"] for each in records(tmp_path / "run").values()]
    without = 3 * np.log(8) / 4  # nats of a token: of three words and the end
    assert losses[0] > without + 1 and np.mean(losses[-20:]) < without - 0.4
