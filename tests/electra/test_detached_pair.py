"""A run whose discriminator adds words to the generator's: as a pair of directories, and as a model to begin with."""

from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.distributed import run_ranks
from support.hf import own_models
from support.hf.published import random_model
from support.hf.published_tokenizers import write_files

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.common.verify import compare_outputs
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.heads import OTHER_HEADS
from megatron_lite.inference.open_run import open_run
from megatron_lite.models.electra import huggingface
from megatron_lite.models.electra.config import discriminator_alone
from megatron_lite.train.start import check_start, load_start

TREE = {"training": {"steps": 6, "precision": "fp32", "seed": 7}, "data": {"sequence_length": 60}}
OF_OURS, OF_THEIRS = "embedding.word_embeddings.weight", "embeddings.word_embeddings.weight"
GENERATOR = "deberta."  # their prefix of a class with a head


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Their classes as directories, and the run made from them."""
    root = tmp_path_factory.mktemp("detached")
    for number, (part, name, layers) in enumerate(
        (("generator", "DebertaV2ForMaskedLM", 1), ("discriminator", "DebertaV2Model", 3))
    ):
        size = write_files("deberta_v3", root / "original" / part)
        model = random_model("deberta_v3", class_name=name, vocab_size=size, num_hidden_layers=layers)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * number)
        model.save_pretrained(root / "original" / part)
    import_directory(root / "original", root / "run", TREE, verify=False)
    return root / "original", root / "run"


def tensors(directory, part):
    return load_file(directory / part / "model.safetensors")


def test_the_pair_comes_back_with_the_words_of_the_sum(pair, tmp_path):
    """All else is bit-equal. The sum of the generator's words and a difference to them is rounded."""
    original, run = pair
    assert import_directory(original, tmp_path / "run", TREE).agreement == 1.0
    assert export_run(run, tmp_path / "export", ExportOptions()).agreement == 1.0
    for part in ("generator", "discriminator"):
        before, after = tensors(original, part), tensors(tmp_path / "export", part)
        assert before.keys() == after.keys()
        different = {name for name in before if not torch.equal(before[name], after[name])}
        assert different <= ({OF_THEIRS} if part == "discriminator" else set())
    words = {part: tensors(original, part) for part in ("generator", "discriminator")}
    own, others = words["discriminator"][OF_THEIRS], words["generator"][GENERATOR + OF_THEIRS]
    assert (own - others).abs().max() > 0.1
    held = own_models.weights_of(run)
    assert torch.equal(held[f"encoder.{OF_OURS}"], own - others)
    exported = tensors(tmp_path / "export", "discriminator")[OF_THEIRS]
    assert torch.equal(exported, held[f"generator.{OF_OURS}"] + held[f"encoder.{OF_OURS}"])
    assert (exported - own).abs().max() <= 2**-23 * others.abs().max()
    heads = load_file(tmp_path / "export/discriminator" / OTHER_HEADS)
    assert {name.partition(".")[0] for name in heads} == {"replaced"}
    model, loading = transformers.DebertaV2Model.from_pretrained(
        tmp_path / "export/discriminator", output_loading_info=True
    )
    assert type(model).__name__ in (tmp_path / "export/README.md").read_text()
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert import_directory(tmp_path / "export", tmp_path / "again", TREE).agreement == 1.0
    again = own_models.weights_of(tmp_path / "again")
    assert all(torch.equal(again[name], held[name]) for name in held if name.startswith("replaced."))


def test_rounded_words_are_the_rounded_sum(pair, tmp_path):
    _, run = pair
    assert export_run(run, tmp_path / "export", ExportOptions(dtype="bf16")).agreement == 1.0
    held = own_models.weights_of(run)
    exported = tensors(tmp_path / "export", "discriminator")[OF_THEIRS]
    assert torch.equal(exported, (held[f"generator.{OF_OURS}"] + held[f"encoder.{OF_OURS}"]).bfloat16())


def test_words_of_one_table_alone_are_noticed(pair, tmp_path):
    _, run = pair
    export_run(run, tmp_path / "export", ExportOptions(verify=False))
    path = tmp_path / "export/discriminator/model.safetensors"
    state = load_file(path)
    state[OF_THEIRS] = own_models.weights_of(run)[f"encoder.{OF_OURS}"]
    save_file(state, path, {"format": "pt"})
    opened = open_run(run)
    checks = partial(huggingface.pair_checks, tmp_path / "export", opened.config)
    with pytest.raises(CheckpointError, match=r"\(hidden states\) does not compute"):
        compare_outputs(
            checks,
            lambda: huggingface.HUGGINGFACE_FORMAT.load(opened, torch.float32),
            1e-5,
            "the export",
            opened.checkpoint.shapes,
        )


def begin(context, config):
    engine = make_engine(config, context, len(LOSS_NAMES))
    load_start(config, engine, context, [], {})
    return {name: p.detach().clone() for name, p in engine.named_parameters.items()}


def test_the_discriminator_alone_begins_with_the_sum(pair, tmp_path):
    """On two tensor-parallel ranks with ZeRO 1, each of which reads its own rows of both tables."""
    _, run = pair
    parallel = {"tensor_parallel_size": 2}
    begins = {"checkpoint": {"initialize_from": str(run)}, "run": {"directory": str(tmp_path / "run")}}
    tree = discriminator_alone(load_yaml(run / "config.yaml"))
    config = build(
        Config,
        merge(
            tree, {**begins, "parallel": parallel, "batch": {"micro_batch_size": 2, "global_batch_size": 2}}
        ),
    )
    check_start(config)
    ranks = run_ranks(begin, 2, config, parallel=ParallelConfig(**parallel))
    held = own_models.weights_of(run)
    expected = held[f"generator.{OF_OURS}"] + held[f"encoder.{OF_OURS}"]
    found = torch.cat([weights[OF_OURS] for weights in ranks])
    assert torch.equal(found[: len(expected)], expected)
    norm = "layers.1.post_attention_layernorm.weight"
    assert torch.equal(ranks[0][norm], held[f"encoder.{norm}"])
