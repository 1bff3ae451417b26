"""The dry run's figures against the real modules: parameters exactly, shares of the optimizer, activations."""

import subprocess
import sys

import pytest
import torch
from support.batches import prefix_batch
from support.distributed import run_ranks
from support.project import ROOT

from data_utils.base.settings import build, merge
from megatron_lite.config.tree import Config, ParallelConfig, load_config
from megatron_lite.model.batch import Batch
from megatron_lite.model.glm import GLM, initialize_parameters
from megatron_lite.model.model_input import ModelInput
from megatron_lite.train.estimate import LOGIT_BYTES, _block_bytes, estimate, stages
from megatron_lite.train.plain import make_engine

MODEL = {
    "model": {"num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300, "max_position": 64},
    "training": {"steps": 10, "precision": "fp32"},
    "data": {"sequence_length": 64},
    "batch": {"micro_batch_size": 2, "global_batch_size": 16},
}  # fmt: skip

LAYOUTS = [
    {},
    {"zero_stage": 2},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 4},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
]


def held(context, tree):
    """Parameters of this rank, elements of the optimizer's shares, number of its stage."""
    engine = make_engine(build(Config, tree), context, 1)
    owned = sum(fragment.tensors["weight"].numel() for fragment in engine.fragments())
    return sum(p.numel() for p in engine.named_parameters.values()), owned, context.pp.rank


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_of_every_rank_are_those_of_the_real_engine(layout):
    tree = merge(MODEL, {"parallel": layout})
    config, world_size = build(Config, tree), 4
    ranks = run_ranks(held, world_size, tree, parallel=build(ParallelConfig, layout))
    expected = [stage.parameters for stage in stages(config)]
    for count, _, stage in ranks:
        assert count == expected[stage]
    found = estimate(config, world_size)
    assert found.rank_parameters in expected
    # A data-parallel rank owns its share of the optimizer's state, 12 bytes an element, padding left out.
    dp = config.parallel.data_parallel_size(world_size)
    stage = expected.index(found.rank_parameters)
    owned = max(owned for _, owned, number in ranks if number == stage)
    assert owned * 12 == pytest.approx(found.memory["optimizer state"], rel=0.02) or dp == 1


@pytest.mark.parametrize("name", ["glm-10b", "albert-base", "bert-large", "spanbert-large", "unilm-large"])
def test_one_process_holds_the_whole_model(name):
    config = load_config([ROOT / f"configs/{name}.yaml"])
    found = estimate(config, 1)
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in GLM(config.model).parameters())
    assert found.parameters == found.rank_parameters == whole


def kept_bytes(config, layers):
    """Bytes that autograd keeps of a forward pass in bf16, parameters left out."""
    model_config = build(Config, merge(MODEL, {"model": {"num_layers": layers}})).model
    model = GLM(model_config, num_losses=3).to(torch.bfloat16)
    initialize_parameters(model.named_parameters(), model_config, 0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # with the tensor, lest its address be used again
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    batch = prefix_batch(0, rows=2, length=config.row_length, vocab=300)
    data = ModelInput.from_batch(Batch(batch), torch.device("cpu"), model_config, multiple=batch[:, 0].size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(data)
    return sum(size for size, _ in kept.values())


def test_activations_of_a_block_are_what_autograd_keeps(monkeypatch):
    # Linear layers and attention of CPUs without bf16 instructions work on fp32 copies: here as on a GPU.
    monkeypatch.setattr("megatron_lite.model.tensor_parallel.widens", lambda *tensors: False)
    monkeypatch.setattr("megatron_lite.model.attention.widens", lambda *tensors: False)
    config = build(Config, merge(MODEL, {"training": {"precision": "bf16"}}))
    block = (kept_bytes(config, 6) - kept_bytes(config, 2)) / 4
    # 34 bytes an element, of which 2 are for dropout masks, which this run has not. A tenth for what a narrow model
    # keeps beside: statistics of the norms and of the softmax, 4 bytes each per token and head.
    assert block == pytest.approx(_block_bytes(config, config.training.recompute) * 32 / 34, rel=0.1)


def test_recomputation_sequence_parallelism_and_zero_save_what_they_should():
    def memory(**parallel):
        recompute = parallel.pop("recompute", "none")
        tree = merge(MODEL, {"parallel": parallel, "training": {"recompute": recompute, "precision": "bf16"}})
        return estimate(build(Config, tree), 8).memory

    plain, full = memory(), memory(recompute="full")
    assert full["activations"] < plain["activations"] / 3
    split = memory(tensor_parallel_size=4), memory(tensor_parallel_size=4, sequence_parallel=True)
    assert split[1]["activations"] == pytest.approx(plain["activations"] / 4)
    assert plain["activations"] > split[0]["activations"] > split[1]["activations"]
    two, three = memory(zero_stage=2), memory(zero_stage=3)
    assert two["gradients"] < plain["gradients"] and three["weights"] == plain["weights"] / 8
    assert plain["optimizer state"] == two["optimizer state"] == three["optimizer state"] > 0
    assert memory(offload_optimizer=True)["optimizer state"] == 0


def test_speed_follows_from_flops_and_peak():
    config = load_config([ROOT / "configs/glm-10b.yaml"], ["run.peak_tflops=100"])
    found, faster = estimate(config, 64), estimate(config, 128)
    # 6 FLOPs a token and parameter, and some for attention and less for the head, which runs on a fifth of the rows
    assert found.flops_per_step == pytest.approx(6 * found.tokens_per_step * found.parameters, rel=0.1)
    assert faster.tokens_per_second == pytest.approx(2 * found.tokens_per_second)
    assert found.seconds_per_step == pytest.approx(found.flops_per_step * 4 / 3 / (64 * 100e12 * 0.4))


def dry_run(*arguments):
    command = [sys.executable, "pretrain_glm.py", "--config", "configs/glm-10b.yaml", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_answers_without_gpu_or_data():
    done = dry_run("64", "parallel.tensor_parallel_size=4")
    assert done.returncode == 0, done.stderr
    assert "data 16 x tensor 4" in done.stdout and "total" in done.stdout and "tokens/s" in done.stdout
    assert done.stdout.startswith("parameters        9,880,682,496;")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0"], "--dry-run is 0; it must be a number of processes"),
        (["5"], "start a number of processes that divides"),
        (["8", "model.vocab_size=null", "tokenizer.path=absent"], "tokenizer absent does not exist"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arguments, message):
    done = dry_run(*arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("objectives", "share"), [({"causal": 1}, 1.0), ({"causal": 1, "xlnet": 3}, 5 / 14)])
def test_the_head_costs_what_the_objectives_predict(objectives, share):
    """Memory of the logits, and the cost by which pipeline stages are balanced."""
    from megatron_lite.train.pipeline import layer_costs  # imports DeepSpeed

    config = build(Config, merge(MODEL, {"objectives": objectives, "model": {"max_position": 80}}))
    tokens = config.batch.micro_batch_size * config.row_length
    assert estimate(config, 1).memory["logits"] == pytest.approx(tokens * share * LOGIT_BYTES * 300)
    assert layer_costs(config.model, config.loss_share)[-1] == pytest.approx(share * 300 / (12 * 64))
