"""A pair of directories of transformers becomes a run of ELECTRA, and a run becomes the same pair again."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.data.tokenizer_files import bert_vocab, write_bert
from support.distributed import run_ranks
from support.hf.published_files import edit
from support.selection import slow_but
from support.systems.electra import electra_config, their_pair
from support.training.engines import layout

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build
from data_utils.objectives import LOSSES
from megatron_lite.checkpoint.manifest import checkpoint_name
from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.models.electra import huggingface

TREE = {"training": {"steps": 6, "precision": "fp32", "seed": 7}, "data": {"sequence_length": 60}}
SIZES = {
    "narrow embeddings": {},
    "odd": {
        "model": {"hidden_size": 36, "num_attention_heads": 3, "num_layers": 3, "ffn_size": 50, "embedding_size": 17},
        "electra": {"generator_size": 0.34, "generator_heads": 3},
    },
    "embeddings of the discriminator": {
        "model": {"embedding_size": None, "hidden_size": 40}, "electra": {"generator_size": 0.3, "generator_heads": 2},
    },
}  # fmt: skip
PAIR = {"generator": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining"}


def write_pair(directory, name="narrow embeddings"):
    lines = bert_vocab()
    changes = SIZES[name]
    changes = {**changes, "model": {**changes.get("model", {}), "vocab_size": len(lines)}}
    pair = their_pair(electra_config(**changes))
    for part, model in zip(PAIR, pair, strict=True):
        model.save_pretrained(directory / part)
        write_bert(directory / part, lines)
    return pair


@pytest.fixture(scope="module", params=slow_but(["narrow embeddings"], SIZES))
def imported(request, tmp_path_factory):
    """The original directory, and the run made from it."""
    root = tmp_path_factory.mktemp("electra")
    write_pair(root / "original", request.param)
    proof = import_directory(root / "original", root / "run", TREE)
    assert proof is not None and proof.largest_difference <= 1e-5 * max(1, proof.largest_logit)
    return root / "original", root / "run"


def test_every_tensor_and_file_comes_back(imported, tmp_path):
    original, run = imported
    proof = export_run(run, tmp_path / "export", ExportOptions())
    assert proof is not None and proof.agreement == 1.0
    for part, class_name in PAIR.items():
        paths = [directory / part for directory in (original, tmp_path / "export")]
        before, after = (load_file(path / "model.safetensors") for path in paths)
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        old, new = (json.loads((path / "config.json").read_text()) for path in paths)
        differing = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        assert differing <= {"transformers_version", "torch_dtype"}
        for name in ("vocab.txt", "tokenizer_config.json"):
            assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes()
        cls = getattr(transformers, class_name)
        _, loading = cls.from_pretrained(paths[1], output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    report = json.loads((tmp_path / "export/proof.json").read_text())
    assert {"logits", "default inputs", "replaced"} <= set(report["comparisons"])
    card = (tmp_path / "export/README.md").read_text()
    assert "ELECTRA" in card and "a generator of" in card and "| step | 0 of 6 |" in card


def test_a_new_run_goes_to_both_classes(imported, tmp_path):
    """Without the files of an import, and rounded."""
    _, run = imported
    (run / "published").rename(tmp_path / "elsewhere")
    try:
        vocabulary = tmp_path / "elsewhere/vocab.txt"
        assert export_run(run, tmp_path / "export", ExportOptions(dtype="bf16"), vocabulary) is not None
    finally:
        (tmp_path / "elsewhere").rename(run / "published")
    assert load_file(tmp_path / "export/generator/model.safetensors")[
        "generator_predictions.dense.weight"
    ].dtype == (torch.bfloat16)


def test_a_wrong_head_of_the_discriminator_is_noticed(imported, tmp_path, monkeypatch):
    original, _ = imported
    forward = huggingface.Electra.scores
    monkeypatch.setattr(huggingface.Electra, "scores", lambda self, batch: forward(self, batch) * 1.01)
    with pytest.raises(CheckpointError, match=r"\(replaced\) does not compute"):
        import_directory(original, tmp_path / "run", TREE)
    assert not (tmp_path / "run").exists()


def saved_again(context, run, output):
    """Continue a run in another layout, and save it."""
    parallel = {"tensor_parallel_size": context.tp.size, "zero_stage": 3}
    tree = load_yaml(run / "config.yaml") | {"parallel": parallel}
    engine = make_engine(build(Config, tree), context, len(LOSSES))
    load_checkpoint(read_checkpoint(run / "checkpoints" / checkpoint_name(0)), engine, context)
    state = TrainerState.at_step_0(tree).to_json()
    save_checkpoint(output / "checkpoints", 1, engine, state, context)


def test_another_layout_gives_the_directory_back(imported, tmp_path):
    original, run = imported
    (tmp_path / "again").mkdir()
    has_odd_heads = load_yaml(run / "config.yaml")["model"]["num_attention_heads"] % 2
    parallel = layout(1 if has_odd_heads else 2, zero=3)
    run_ranks(saved_again, 2, run, tmp_path / "again", parallel=ParallelConfig(**parallel))
    (tmp_path / "again/published").symlink_to(run / "published")
    export_run(tmp_path / "again", tmp_path / "export", ExportOptions(verify=False))
    for part in PAIR:
        before, after = (
            load_file(path / part / "model.safetensors") for path in (original, tmp_path / "export")
        )
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


def change_tensor(part, name):
    def change(directory):
        state = load_file(directory / part / "model.safetensors")
        state[name] = state[name] + 1
        save_file(state, directory / part / "model.safetensors", {"format": "pt"})

    return change


def lose_tensor(part, name):
    def change(directory):
        state = load_file(directory / part / "model.safetensors")
        del state[name]
        save_file(state, directory / part / "model.safetensors", {"format": "pt"})

    return change


POSITIONS, HEAD = "electra.embeddings.position_embeddings.weight", "discriminator_predictions.dense.bias"


@pytest.mark.parametrize(
    ("change", "tree", "parts"),
    [
        (change_tensor("generator", POSITIONS), {}, ("position_embeddings", "trained together")),
        (lose_tensor("discriminator", HEAD), {}, (f"lacks {HEAD}",)),
        (lose_tensor("generator", "generator_predictions.dense.bias"), {}, ("lacks generator_predictions",)),
        (lambda d: edit(d / "discriminator", hidden_act="relu"), {}, ("hidden_act is 'relu'", "one of gelu")),
        (lambda d: edit(d / "generator", layer_norm_eps=1e-5), {}, ("the generator.layernorm_epsilon is", "1e-05")),
        (lambda d: None, {"electra": {"generator_heads": 1}}, ("the generator.num_attention_heads is 1", "has 2")),
        (lambda d: None, {"model": {"norm": "pre"}}, ("model.norm is 'pre'", "has 'post'")),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused_in_one_line(change, tree, parts, tmp_path):
    write_pair(tmp_path / "pair")
    change(tmp_path / "pair")
    with pytest.raises((CheckpointError, ConfigError)) as error:
        import_directory(tmp_path / "pair", tmp_path / "run", TREE | tree)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message
    assert not (tmp_path / "run").exists()


MASKED = TREE | {"objectives": {"masked_lm": 1}}


def test_a_generator_alone_is_a_masked_model(tmp_path):
    write_pair(tmp_path / "pair")
    assert import_directory(tmp_path / "pair/generator", tmp_path / "other", MASKED) is not None


@pytest.mark.parametrize("name", SIZES)
def test_a_discriminator_alone_is_an_encoder(tmp_path, name, caplog):
    """Its body is proved on hidden states, with its head and without; a wrong body fails the proof."""
    _, theirs = write_pair(tmp_path / "pair", name)
    path = tmp_path / "pair/discriminator"
    assert import_directory(path, tmp_path / "run", MASKED).agreement == 1.0
    assert ("heads.projection" in caplog.text) == (theirs.config.embedding_size != theirs.config.hidden_size)
    theirs.electra.save_pretrained(path)
    assert import_directory(path, tmp_path / "again", MASKED).agreement == 1.0
    body = load_file(path / "model.safetensors")
    for run in ("run", "again"):  # goes back as the class without a head, before tuning too
        assert export_run(tmp_path / run, tmp_path / f"{run} out", ExportOptions()).agreement == 1.0
        after = load_file(tmp_path / f"{run} out/model.safetensors")
        assert after.keys() == body.keys()
        assert [key for key in body if not torch.equal(body[key], after[key])] == []
        described = json.loads((tmp_path / f"{run} out/config.json").read_text())
        assert described["architectures"] == ["ElectraModel"]
