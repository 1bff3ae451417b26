"""Policies of fine-tuning: rates by depth, freezing, unfreezing; against plain torch, in layouts, resumed."""

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.selection import slow_but
from support.tasks.tasks import task_of, write_task
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError, ConfigError
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import new_parameters, read_checkpoint
from megatron_lite.config.learning_rates import learning_rate
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.finetune import policies
from megatron_lite.finetune.data import TaskData
from megatron_lite.finetune.run import finetune, task_lr_multipliers
from megatron_lite.optim.lr_multipliers import NEVER, NO_MULTIPLIERS, LrMultipliers
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.micro_batch import MicroBatch

ULMFIT = ["finetune.layer_decay=0.5", "finetune.unfreeze=gradual"]
STEPS = ["finetune.epochs=3", "batch.micro_batch_size=4", "optimizer.clip_grad_norm=0.1"]  # 4 steps an epoch
POLICIES = {
    "decay": ["finetune.layer_decay=0.5"],
    "gradual": ULMFIT,
    "biases": ["finetune.trained=biases"],
    "adapters": ["finetune.trained=adapters", "model.adapter_size=8"],
    "lora": ["finetune.trained=lora", "model.lora.rank=4"],
    "head": ["finetune.trained=head"],
    "mix": ["finetune.trained=head", "model.task_head.mix=true"],
}


def run(context, files, output, *overrides):
    return finetune(task_of(files, output, *overrides), output, context)


def learn(files, output, *overrides, world=1, **parallel):
    settings = [f"parallel.{name}={value}" for name, value in parallel.items()]
    run_ranks(run, world, files, output, *overrides, *settings, parallel=ParallelConfig(**parallel))
    return output / "seed_1234/checkpoints"


def last(directory):
    return read_checkpoint(list_checkpoints(directory)[-1])


def plain_torch(task, steps):
    """One parameter group for each parameter, gradients of all samples at once, clip_grad_norm_, torch's AdamW."""
    config = task.config
    model = build_model(config, 1)
    data = TaskData(task.train, task.renderer, config.training.seed)
    settings, schedule, size = config.optimizer, config.schedule, config.batch.global_batch_size
    of_names = task_lr_multipliers(task)
    groups = [
        {
            "params": [parameter],
            "weight_decay": 0.0 if name.endswith("bias") or "layernorm" in name else settings.weight_decay,
            "multipliers": of_names[name],
        }
        for name, parameter in model.named_parameters()
    ]
    adamw = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(1, steps + 1):
        lr = learning_rate(
            step, peak=settings.lr, kind=schedule.kind, warmup_steps=schedule.warmup_steps,
            decay_steps=config.decay_steps, min_lr_ratio=schedule.min_lr_ratio,
        )  # fmt: skip
        for group in adamw.param_groups:
            group["lr"] = lr * group["multipliers"].lr_factor
            (parameter,) = group["params"]
            parameter.requires_grad_(step >= group["multipliers"].first_step)
            parameter.grad = None
        batch = data.batch(np.arange((step - 1) * size, step * size))
        loss, sums = model(MicroBatch.from_batch(batch, torch.device("cpu"), config.model))
        (loss / sums[-1, 1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
        adamw.step()
    return initial, dict(model.named_parameters())


@pytest.mark.parametrize("policy", slow_but(["lora", "mix"], POLICIES))
def test_policies_equal_plain_torch(tmp_path, policy):
    """fp32: the order of sums differs, which Adam's first steps turn into up to 1e-5 of a rate of 3e-3."""
    files = write_task(tmp_path / "task")
    options = [*POLICIES[policy], *STEPS]
    found = load_weights(last(learn(files, tmp_path / "out", *options)))
    task = task_of(files, tmp_path / "out", *options)
    initial, expected = plain_torch(task, 12)
    rates = task_lr_multipliers(task)
    for name, weight in found.items():
        rows = len(weight)
        torch.testing.assert_close(weight, expected[name][:rows].detach(), rtol=1e-4, atol=2e-5, msg=name)
        is_frozen = rates[name].first_step > 12
        assert torch.equal(weight, initial[name][:rows]) == is_frozen, name
    assert (NEVER in {rate.first_step for rate in rates.values()}) == (policy not in ("decay", "gradual"))


LAYOUTS = [
    {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2},
    {"zero_stage": 1},
    {"zero_stage": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS[:1], LAYOUTS[1:]])
def test_layouts_and_a_resumed_run_equal_one_process(tmp_path, layouts):
    """With dropout, and what begins later: head and top block in epoch 1, the other block in 2, embeddings in 3."""
    files = write_task(tmp_path / "task")
    options = [
        *ULMFIT,
        *STEPS,
        "model.adapter_size=8",
        "model.task_head.mix=true",
        "model.output_dropout=0.1",
        "training.steps=12",
        "training.eval_interval=5",
    ]
    one = last(learn(files, tmp_path / "one", *options))
    expected = load_weights(one)
    counts = one.optimizer["adam_steps"]
    assert one.optimizer["adam_step"] == 12.0
    assert {name.partition(".")[0]: count for name, count in counts.items()} == {
        "embedding": 4.0,
        "layers": 8.0,
    }
    for number, parallel in enumerate(layouts):
        found = last(learn(files, tmp_path / str(number), *options, world=2, **parallel))
        assert found.optimizer["adam_steps"] == counts, parallel
        for name, weight in load_weights(found).items():
            torch.testing.assert_close(
                weight, expected[name], rtol=1e-4, atol=2e-5, msg=f"{parallel}: {name}"
            )
    for stop in (3, 6):  # before each beginning, and within an epoch
        learn(files, tmp_path / "resumed", *options, f"training.stop_after_step={stop}")
    resumed = last(learn(files, tmp_path / "resumed", *options))
    assert resumed.optimizer == one.optimizer
    for name, weight in load_weights(resumed).items():
        assert torch.equal(weight, expected[name]), name


def step_of_engine(context, files, output, *overrides):
    """Names with a gradient in the first step, elements of all gradients, Adam's counts of an old manifest."""
    task = task_of(files, output, *overrides)
    engine = PlainEngine(task.config, context, 1, task_lr_multipliers(task))
    data = TaskData(task.train, task.renderer, 0)
    seen = set()
    for name, parameter in engine.named_parameters.items():
        if parameter.requires_grad:
            parameter.register_hook(lambda _, name=name: seen.add(name))
    before = {name: p.detach().clone() for name, p in engine.named_parameters.items()}
    allocated = []  # elements of gradients
    engine.before_update = lambda: allocated.extend(
        bucket.size
        for bucket in engine._zero.buckets
        if not (bucket.grad_shard is None and bucket.grad_buffer is None)
    )
    # Blocks that are one function of autograd give the gradients of all their parameters.
    frozen = engine.named_parameters["layers.0.mlp.dense_h_to_4h.weight"]
    engine._zero.add_gradient(frozen, torch.ones_like(frozen))
    engine._zero.accumulate_weight_grad(frozen, torch.ones(3, len(frozen)), torch.ones(3, frozen.shape[1]))
    assert frozen.grad is None
    halves = [engine.prepared(data.batch(np.arange(first, first + 8)), 0, 1 / 16) for first in (0, 8)]
    result = engine.train_step(halves, 0.1)
    changed = {name for name, p in engine.named_parameters.items() if not torch.equal(p, before[name])}
    engine.load_scalar_state({"adam_step": 7.0, "loss_scaler": {}})
    return seen, changed, sum(allocated), result.grad_norm, engine.scalar_state()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_have_no_gradient(tmp_path, precision):
    files = write_task(tmp_path / "task")
    options = ["finetune.trained=head", f"training.precision={precision}"]
    (result,) = run_ranks(step_of_engine, 1, files, tmp_path / "out", *options)
    seen, changed, allocated, norm, state = result
    assert seen == changed == {"heads.task.classifier.weight", "heads.task.classifier.bias"}
    assert 0 < allocated <= 256 and norm > 0
    assert state["adam_step"] == 7.0 and state["adam_steps"] == {}  # a manifest of before has one number


def test_a_policy_that_trains_nothing_is_refused(tmp_path):
    cloze = {"kind": "cloze", "template": "{text} [MASK]", "verbalizers": {"0": "bad", "1": "good"}}
    files = write_task(tmp_path / "task", **cloze)
    task = task_of(files, tmp_path / "out", "finetune.trained=head")
    with pytest.raises(
        ConfigError, match=r"trained is head, .* cloze adds no head; set finetune.trained to all"
    ):
        task_lr_multipliers(task)


def test_depths_and_beginnings(tmp_path):
    files = write_task(tmp_path / "task")
    task = task_of(files, tmp_path / "out", *ULMFIT, "model.num_layers=3", "batch.global_batch_size=40")
    found = task_lr_multipliers(task)
    assert found["heads.task.classifier.weight"] == found["final_layernorm.bias"] == NO_MULTIPLIERS
    assert found["layers.2.mlp.dense_h_to_4h.bias"] == LrMultipliers(0.5, 1)
    # Of 64 samples each: epoch 2 begins in step 2, whose samples 40 to 79 are of both; 3 with sample 128, in step 4.
    assert found["layers.1.mlp.dense_h_to_4h.bias"] == LrMultipliers(0.25, 3)
    assert found["layers.0.attention.dense.weight"] == LrMultipliers(0.125, 5)
    assert found["embedding.word_embeddings.weight"] == LrMultipliers(0.0625, 6)
    elements = {name: int(np.prod(shape)) for name, shape in parameter_shapes(task.config.model).items()}
    line = policies.describe_trained(found, elements, 5)
    assert line.endswith("at steps 1, 3, 5") and "40 of 43 parameters" in line
    assert task_lr_multipliers(task_of(files, tmp_path / "out")) == {}


def test_biases_and_the_new_head_are_trained(tmp_path):
    files = write_task(tmp_path / "task")
    task = task_of(files, tmp_path / "out", "finetune.trained=biases")
    rates = task_lr_multipliers(task)
    biases = {name for name, rate in rates.items() if rate.first_step == 1}
    assert biases == {name for name in rates if name.endswith("bias")} | {"heads.task.classifier.weight"}


def test_adapters_begin_as_nothing_and_alone_change_a_checkpoint(tmp_path):
    files = write_task(tmp_path / "task")
    body = load_weights(last(learn(files, tmp_path / "one", "finetune.epochs=1")))
    begin = [f"checkpoint.initialize_from={tmp_path / 'one/seed_1234'}", "finetune.epochs=2"]
    adapters = ["finetune.trained=adapters", "model.adapter_size=8", "optimizer.weight_decay=0"]
    found = load_weights(last(learn(files, tmp_path / "two", *begin, *adapters)))
    for name, weight in body.items():
        assert torch.equal(found[name], weight) != ("layernorm" in name or name.startswith("heads.")), name
    new = {name for name in found if name not in body}
    assert len(new) == 2 * 2 * 4 and all(found[name].abs().sum() > 0 for name in new)
    again = learn(
        files,
        tmp_path / "again",
        *adapters,
        "optimizer.lr=1e-30",
        "finetune.epochs=1",
        f"checkpoint.initialize_from={tmp_path / 'two/seed_1234'}",
    )
    found_again = load_weights(last(again))
    assert all(
        torch.equal(found_again[name], found[name]) for name in new
    )  # a checkpoint's own are taken over
    for size in (4, 0):
        shapes = parameter_shapes(task_of(files, tmp_path, f"model.adapter_size={size}").config.model)
        with pytest.raises(CheckpointError, match="another model"):
            new_parameters(last(again), shapes)


def test_adapters_begin_as_nothing(tmp_path):
    files = write_task(tmp_path / "task")
    losses = []
    for size in (0, 8):
        task = task_of(files, tmp_path / "out", f"model.adapter_size={size}")
        batch = TaskData(task.train, task.renderer, 0).batch(np.arange(8))
        model = build_model(task.config, 1)
        losses.append(model(MicroBatch.from_batch(batch, torch.device("cpu"), task.config.model))[0].item())
    assert losses[0] == losses[1] > 0


def test_a_mix_of_layers_is_elmos(tmp_path):
    """gain * sum of softmax(s)_j norm(h_j), of what goes into each block and of what the last one gives."""
    task = task_of(write_task(tmp_path / "task"), tmp_path / "out", "model.task_head.mix=true")
    model = build_model(task.config, 1)
    batch = TaskData(task.train, task.renderer, 0).batch(np.arange(8))
    given = MicroBatch.from_batch(batch, torch.device("cpu"), task.config.model)
    outputs = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    model.layers[-1].register_forward_hook(lambda _, inputs, output: outputs.append(output))
    mix = model.heads.task.mix
    scores, gain = torch.tensor([0.3, -1.0, 2.0]), 1.7
    with torch.no_grad():
        assert not mix.layer_bias.any() and not mix.gain_bias.any()
        mix.layer_bias.copy_(scores)
        mix.gain_bias.fill_(gain - 1)
        answers = model(given, predict=True)[0]
        assert len(outputs) == 3
        rows = [output[given.extra_inputs.positions].double() for output in outputs]
        normed = [
            (row - row.mean(-1, keepdim=True)) / (row.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
            for row in rows
        ]
        shares = scores.double().exp() / scores.double().exp().sum()
        mixed = gain * sum(share * row for share, row in zip(shares, normed, strict=True))
        classifier = model.heads.task.classifier
        expected = mixed @ classifier.weight.double().T + classifier.bias.double()
    torch.testing.assert_close(answers.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_pool_needs_a_head_of_texts(tmp_path):
    cloze = {"kind": "cloze", "template": "{text} [MASK]", "verbalizers": {"0": "bad", "1": "good"}}
    files = write_task(tmp_path / "task", **cloze)
    with pytest.raises(
        ConfigError, match=r"task_head\.pool is concat, but the task is of kind cloze, .* no head of whole"
    ):
        task_of(files, tmp_path / "out", "model.task_head.pool=concat")


def test_a_mix_needs_a_head(tmp_path):
    cloze = {"kind": "cloze", "template": "{text} [MASK]", "verbalizers": {"0": "bad", "1": "good"}}
    files = write_task(tmp_path / "task", **cloze)
    with pytest.raises(
        ConfigError, match=r"task_head\.mix is true, but the task is of kind cloze, .* no head"
    ):
        task_of(files, tmp_path / "out", "model.task_head.mix=true")


def test_siatls_order(tmp_path):
    files = write_task(tmp_path / "task")
    found = task_lr_multipliers(task_of(files, tmp_path / "out", "finetune.unfreeze=siatl"))
    starts = {name.split(".")[0]: rate.first_step for name, rate in found.items()}
    assert starts == {"heads": 1, "final_layernorm": 5, "layers": 5, "embedding": 17}  # 4 steps an epoch


def test_the_layer_before_the_output_matrix_is_trained_where_something_reads_it(tmp_path):
    """As the layer before the head of a task, by tasks that predict tokens, and by the model's own loss."""
    classes = write_task(tmp_path / "classes")
    cloze = {"kind": "cloze", "template": "{text} [MASK]", "verbalizers": {"0": "bad", "1": "good"}}
    tokens = write_task(tmp_path / "cloze", **cloze)
    pooled = ("model.task_head.pooler=true", "model.task_head.pooler_kind=transform")
    cases = [
        (classes, (), True),
        (classes, pooled, False),
        (classes, pooled[1:], True),
        (tokens, pooled, False),
    ]
    for files, overrides, is_unused in [*cases, (classes, (*pooled[1:], "finetune.lm_weight=0.2"), False)]:
        config = task_of(files, tmp_path / "out", "model.head_transform=true", *overrides).config
        assert model_spec(config).is_unused("heads.projection.dense.weight", config) == is_unused, overrides
