"""SiATL's loss of a language model added to a task's: its value, its gradient, in layouts, resumed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.tasks.tasks import task_of, write_task
from support.training.whole_weights import load_weights

from data_utils.common.errors import ConfigError
from data_utils.objectives import LOSS_NAMES
from data_utils.tasks.templates.collate import collate
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.learning_rates import learning_rate
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.finetune import policies
from megatron_lite.finetune.data import TaskData
from megatron_lite.finetune.run import finetune, task_lr_multipliers, training_data
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import MicroBatch

CPU = torch.device("cpu")
SIATL = ["finetune.lm_weight=0.8", "finetune.lm_weight_last=0.2", "finetune.lm_weight_epochs=3"]
STEPS = ["finetune.epochs=3", "batch.micro_batch_size=4"]  # 4 steps an epoch


def run(context, files, output, *overrides):
    return finetune(task_of(files, output, *overrides), output, context)


def learn(files, output, *overrides, world=1, **parallel):
    settings = [f"parallel.{name}={value}" for name, value in parallel.items()]
    run_ranks(run, world, files, output, *overrides, *settings, parallel=ParallelConfig(**parallel))
    return read_checkpoint(list_checkpoints(output / "seed_1234/checkpoints")[-1])


def unequal_task(directory, **task):
    """Texts of 1 to 13 words, so that the language model's tokens differ from batch to batch."""
    files = write_task(directory, **task)
    lines = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["text"] = " ".join(
            ["film", "was", line["text"], "plot", ".", "It", "was", "good"][: 1 + number % 8]
        )
    (directory / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def plain_torch(task, steps):
    """The task's loss and the language model's each from a batch of its own; torch's AdamW."""
    config = task.config
    model, names = build_model(config, len(LOSS_NAMES) + 1), task_lr_multipliers(task)
    data, weight = training_data(task), policies.language_weight(config, len(task.train))
    settings, schedule, size = config.optimizer, config.schedule, config.batch.global_batch_size
    groups = [
        {
            "params": [parameter],
            "weight_decay": 0.0 if name.endswith("bias") or "layernorm" in name else settings.weight_decay,
        }
        for name, parameter in model.named_parameters()
    ]
    adamw = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    losses = []
    for step in range(1, steps + 1):
        for group, name in zip(adamw.param_groups, dict(model.named_parameters()), strict=True):
            group["lr"] = learning_rate(
                step, peak=settings.lr, kind=schedule.kind, warmup_steps=schedule.warmup_steps,
                decay_steps=config.decay_steps, min_lr_ratio=schedule.min_lr_ratio,
            )  # fmt: skip
            group["params"][0].requires_grad_(not names or step >= names[name].first_step)
            group["params"][0].grad = None
        numbers = np.arange((step - 1) * size, step * size)
        own = TaskData(task.train, task.renderer, config.training.seed).batch(numbers)
        of_task, task_sums = model(MicroBatch.from_batch(own, CPU, config.model))
        both = [data.sample(number) for number in numbers.tolist()]
        texts = [
            replace(sample, documents=sample.documents[len(sample.documents) // 2 :], target_groups=())
            for sample in both
        ]
        batch = Batch(collate(texts)[0])
        of_texts, _ = model(MicroBatch.from_batch(batch, CPU, config.model))
        loss = of_task / task_sums[-1, 1] + weight(step) * of_texts / batch.weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
        adamw.step()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("policy", ["all", pytest.param("siatl", marks=pytest.mark.slow)])
def test_loss_and_gradient_equal_plain_torch(tmp_path, policy):
    """fp32: the order of sums differs, which Adam's first steps turn into up to 1e-5 of a rate of 3e-3."""
    files = unequal_task(tmp_path / "task")
    options = [*SIATL, *STEPS, f"finetune.unfreeze={policy}", "run.log_interval=1"]
    found = load_weights(learn(files, tmp_path / "out", *options))
    losses, expected = plain_torch(task_of(files, tmp_path / "out", *options), 12)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name][: len(weight)], rtol=1e-4, atol=2e-5, msg=name)
    lines = map(json.loads, (tmp_path / "out/seed_1234/metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line["kind"] == "train"]
    np.testing.assert_allclose([line["loss"] for line in trained], losses, rtol=1e-4)
    weights = [0.8] * 4 + [0.4] * 4 + [0.2] * 4
    for line, weight in zip(trained, weights, strict=True):
        assert line["loss"] == pytest.approx(line["loss/votes"] + weight * line["loss/token"], rel=1e-5)


LAYOUTS = [
    {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2},
    {"zero_stage": 2},
    {"zero_stage": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS[:1], LAYOUTS[1:]])
def test_layouts_and_a_resumed_run_equal_one_process(tmp_path, layouts):
    """With dropout, two data-parallel ranks of unequal texts, and a head of tokens that begins with the blocks."""
    files = unequal_task(tmp_path / "task")
    options = [
        *SIATL,
        *STEPS,
        "finetune.unfreeze=siatl",
        "model.head_transform=true",
        "model.head_bias=true",
        "model.output_dropout=0.1",
        "training.eval_interval=5",
    ]
    one = learn(files, tmp_path / "one", *options)
    expected = load_weights(one)
    for number, parallel in enumerate(layouts):
        found = learn(files, tmp_path / str(number), *options, world=2, **parallel)
        for name, weight in load_weights(found).items():
            torch.testing.assert_close(
                weight, expected[name], rtol=1e-4, atol=2e-5, msg=f"{parallel}: {name}"
            )
    for stop in (3, 6):
        learn(files, tmp_path / "resumed", *options, f"training.stop_after_step={stop}")
    resumed = learn(files, tmp_path / "resumed", *options)
    for name, weight in load_weights(resumed).items():
        assert torch.equal(weight, expected[name]), name


def test_weights_are_siatls(tmp_path):
    files = write_task(tmp_path / "task")
    task = task_of(files, tmp_path, "finetune.lm_weight=0.2018965", "finetune.lm_weight_last=0.1002588")
    weight = policies.language_weight(task.config, 64)  # 4 steps an epoch
    of_epochs = [*np.exp(np.linspace(-1.6, -2.3, 15)), np.exp(-2.3)]
    for epoch, expected in enumerate(of_epochs):
        assert (
            weight(4 * epoch + 1) == pytest.approx(weight(4 * epoch + 4)) == pytest.approx(expected, rel=1e-6)
        )
    same = policies.language_weight(task_of(files, tmp_path, "finetune.lm_weight=0.5").config, 64)
    assert same(1) == same(1000) == 0.5
    assert policies.language_weight(task_of(files, tmp_path).config, 64) is None


@pytest.mark.parametrize("objective", ["blank_infilling", "masked_lm", "causal", "xlnet"])
def test_documents_hold_the_text_and_differ_in_each_epoch(tmp_path, objective):
    files = write_task(tmp_path / "task")
    options = [f"objectives={{{objective}: 1}}", "tokenizer.added_tokens=glm", "finetune.lm_weight=0.2"]
    options += ["model.relative=xlnet", "model.positions=none"] if objective == "xlnet" else []
    task = task_of(files, tmp_path / "out", *options)
    data = training_data(task)
    words = task.tokenizer.encode(task.train[0].fields["text"])
    place = next(n for n in range(64) if data._order(0)[n] == 0)
    epochs = [data.sample(place)] + [
        data.sample(64 * epoch + n) for epoch in range(1, 4) for n in range(64) if data._order(epoch)[n] == 0
    ]
    drawn = set()
    for sample in epochs:
        own, text = sample.documents
        assert not own.weights.any() and text.weights.sum() > 0
        hidden = text.targets[text.weights > 0]
        kept = [*text.tokens, *hidden]
        assert all(kept.count(word) >= words.count(word) for word in words)
        drawn.add(text.tokens.tobytes() + text.weights.tobytes() + text.ord.tobytes())
    assert len(drawn) > 1 or objective == "causal"


def test_labels_of_sentences_are_left_out(tmp_path):
    options = ["objectives={masked_lm: 1}", "masked_lm.next_sentence=true", "model.sentence_classes=2"]
    options += ["model.segments=2", "finetune.lm_weight=0.2"]
    task = task_of(write_task(tmp_path / "task"), tmp_path / "out", *options)
    batch = training_data(task).batch(np.arange(8))
    weights = batch.loss_divisors(len(LOSS_NAMES) + 1)
    assert weights[LOSS_NAMES.index("next_sentence")] == 0 < weights[LOSS_NAMES.index("masked")]
    assert weights[-1] == batch.loss_divisor == 8


CLOZE = {"kind": "cloze", "template": "{text} [MASK]", "verbalizers": {"0": "bad", "1": "good"}}


@pytest.mark.parametrize(
    "options, task, message",
    [
        (["finetune.lm_weight=0.2"], CLOZE, "lm_weight is 0.2, but a task of kind cloze adds no head"),
        (
            ["finetune.lm_weight=0.2", "finetune.trained=head"],
            {},
            "finetune.lm_weight is",
        ),
        (
            ["finetune.lm_weight=0.2", "model.max_position=23", "data.sequence_length=16"],
            {},
            r"positions up to 24 .*max_position is 23",
        ),
        (["finetune.lm_weight=-1"], {}, "lm_weight is -1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, task, message):
    files = write_task(tmp_path / "task", **task)
    with pytest.raises(ConfigError, match=message):
        task_of(files, tmp_path / "out", *options)


def test_siatls_order_needs_a_new_head(tmp_path):
    task = task_of(write_task(tmp_path / "task", **CLOZE), tmp_path / "out", "finetune.unfreeze=siatl")
    with pytest.raises(ConfigError, match=r"unfreeze is siatl, .* the task adds none"):
        task_lr_multipliers(task)
