"""OPTIMUS begins with a published BERT and a published GPT-2, imported as two runs."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from support.distributed import run_ranks
from support.hf.published import random_model
from support.systems.optimus_runs import GPT2_NAMES, optimus_tree

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, to_tree
from data_utils.objectives import LOSS_NAMES
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.hf.importing import import_directory
from megatron_lite.train.start import check_start, load_start
from megatron_lite.transformer.build import build_model

WORDS = "decoder.embedding.word_embeddings.weight"
RUN = {"training": {"steps": 5}, "data": {"sequence_length": 24}}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Two directories of transformers, the runs that they became, and the configuration that begins with them."""
    root = tmp_path_factory.mktemp("stacks")
    tree = optimus_tree(root)
    for name, case, objective in (("encoder", "bert", "masked_lm"), ("decoder", "gpt2", "causal")):
        tokenizer = {
            **tree["tokenizer" if name == "encoder" else "decoder_tokenizer"],
            "added_tokens": "none",
        }
        size = load_tokenizer(TokenizerConfig(**tokenizer)).vocab_size
        model = random_model(case, vocab_size=size)
        model.save_pretrained(root / name)
        settings = {**RUN, "objectives": {objective: 1}, "tokenizer": tokenizer}
        import_directory(root / name, root / f"{name}_run", settings, verify=False)
        stack = to_tree(build(Config, load_yaml(root / f"{name}_run/config.yaml")).model)
        tree["model" if name == "encoder" else "decoder"] = {**stack, "vocab_size": None}
    begins = {f"{name}_from": str(root / f"{name}_run") for name in ("encoder", "decoder")}
    tree["optimus"] = {**tree["optimus"], **begins}
    return root, tree


def config_of(tree):
    config = build(Config, tree)
    sizes = [load_tokenizer(section).vocab_size for section in (config.tokenizer, config.decoder_tokenizer)]
    return config.with_vocab_size(*sizes)


def begin(context, config):
    engine = PlainEngine(config, context, len(LOSS_NAMES))
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megatron_lite.models.optimus.pretrained_stacks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    load_start(config, engine, context, [], {})
    return {name: p.detach().clone() for name, p in engine.named_parameters.items()}, lines


def test_a_published_bert_and_gpt2_become_optimus(imported):
    """GPT-2's table has three rows less; they keep their initial values."""
    root, tree = imported
    config = config_of({**tree, "parallel": {"zero_stage": 2}})
    check_start(config)
    found, lines = run_ranks(begin, 2, config, parallel=ParallelConfig(zero_stage=2))[0]
    theirs = load_file(root / "decoder/model.safetensors")["transformer.wte.weight"]
    rows = len(GPT2_NAMES)
    assert torch.equal(found[WORDS][:rows], theirs)
    initial = dict(build_model(config, len(LOSS_NAMES)).named_parameters())[WORDS]
    assert torch.equal(found[WORDS][rows:], initial[rows:]) and found[WORDS][rows : rows + 3].all()
    bert = load_file(root / "encoder/model.safetensors")
    layer = "layers.0.attention.dense.weight"
    assert torch.equal(found[f"encoder.{layer}"], bert["bert.encoder.layer.0.attention.output.dense.weight"])
    gpt2 = load_file(root / "decoder/model.safetensors")["transformer.h.0.attn.c_proj.weight"]
    assert torch.equal(found[f"decoder.{layer}"], gpt2.T)
    assert lines[0] == f"the encoder is initialized from {root / 'encoder_run/checkpoints/step_00000000'}"
    assert "<PAD>, <BOS>, <EOS>" in lines[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_tokenizer": {"added_tokens": "glm"}}, "decoder_from is .* differs"),
        ({"tokenizer": {"lowercase": False}}, "encoder_from is .* differs"),
    ],
)
def test_other_tokenizers_are_refused(imported, change, message):
    (key, options), (_, tree) = next(iter(change.items())), imported
    config = config_of({**tree, key: {**tree[key], **options}})
    with pytest.raises(CheckpointError, match=message):
        check_start(config)
