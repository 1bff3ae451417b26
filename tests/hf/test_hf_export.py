"""Export from every layout, in half precision, with the model card, in bounded memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.distributed import run_ranks
from support.hf.hf_runs import make_config, make_model, settings_of, tree, without_padding, write_run
from support.project import ROOT
from support.training.engines import layout, placed

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from data_utils.common.settings import merge
from megatron_lite.checkpoint.manifest import write_manifest
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import BLOCK_POSITIONS
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.common.config_json import by_transformers
from megatron_lite.hf.common.weights import new_directory, open_directory
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.glm.pipeline_glm import BlankInfillingPipeline
from megatron_lite.hf.glm.tokenizer_files import exported_tokenizer
from megatron_lite.hf.glm.verify import class_inputs, span_batch
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.verify_inputs import our_output
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.inference.open_run import load_run

# Processes and layout of the run that saved the checkpoint: all with TP x PP up to 4, a few of them always.
LAYOUTS = [
    (1, layout()),
    (4, layout(tp=2, pp=2)),
]
MORE_LAYOUTS = [
    (4, layout(tp=2, zero=3)),
    (2, layout(pp=2)),
    (4, layout(tp=4, sp=True)),
    *((2, layout(zero=zero)) for zero in (1, 2, 3)),
    *((2 * tp, layout(tp=tp, zero=zero)) for tp in (2, 4) for zero in (1, 2, 3)),
    (4, layout(pp=4)),
    (8, layout(tp=2, pp=2)),
]


# Export


def save_layout(context, settings, directory):
    config = make_config(settings)
    engine = make_engine(config, context, num_losses=3)
    whole = without_padding(make_model(config))
    for fragment, run, positions in placed(engine):
        part = fragment.tensors["weight"][run.start - fragment.start : run.stop - fragment.start]
        part.data.copy_(whole[fragment.name].flatten()[positions])
    engine.gather_weights()
    state = TrainerState.at_step_0(settings).to_json()
    save_checkpoint(Path(directory) / "checkpoints", 5, engine, state, context)


@pytest.mark.parametrize(
    "ranks, parallel", [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_LAYOUTS)]
)
def test_every_layout_exports_its_model(vocabulary, tmp_path, ranks, parallel):
    settings = settings_of(vocabulary, parallel)
    run_ranks(save_layout, ranks, settings, tmp_path / "run", parallel=ParallelConfig(**parallel))
    found = export_run(tmp_path / "run", tmp_path / "export", ExportOptions(max_shard_bytes=30_000))
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0 and found.rows > 3 * 64
    exported = open_directory(tmp_path / "export")
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 3
    for name, weight in without_padding(make_model(make_config(settings))).items():
        assert torch.equal(exported.read(f"glm.{name}"), weight)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_the_rounded_model(run, tmp_path, dtype):
    found = export_run(run, tmp_path / "export", ExportOptions(dtype=dtype))
    assert found.largest_difference <= 1e-5
    stored = load_file(tmp_path / "export/model.safetensors")
    assert {str(t.dtype) for t in stored.values()} == {
        {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    }


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_gelu_is_part_of_the_model(vocabulary, tmp_path, gelu):
    write_run(tmp_path / "run", tree(vocabulary, activation=f"gelu_{gelu}"))
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["gelu"] == gelu
    (tmp_path / "export/config.json").write_text(
        json.dumps({**config, "gelu": "erf" if gelu == "tanh" else "tanh"})
    )
    batch = span_batch(make_config(tree(vocabulary)).model)
    with by_transformers(tmp_path / "export"):
        swapped = GLMForBlankInfilling.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        logits = swapped(**class_inputs(batch), use_cache=False).logits
    model = load_run(tmp_path / "run").model
    assert (logits - our_output(model, batch)[1]).abs().max() > 1e-4  # the setting is not idle


LOCAL = {"attention_window": 6, "global_every": 2, "rotary_base_local": 50.0}
MODERN = {"rms_norm": True, "ffn": "gated", "ffn_size": 40, "biases": "none", **LOCAL}


@pytest.mark.parametrize("left", [(), *((name,) for name in MODERN if name not in LOCAL), tuple(LOCAL)])
def test_models_of_modern_blocks_there_and_back(vocabulary, tmp_path, left):
    """All of the options, all but one, and none of local layers; config.json alone says them."""
    options = {name: value for name, value in MODERN.items() if name not in left}
    model = write_run(
        tmp_path / "run", tree(vocabulary, positions="rotary", block_positions="halves", **options)
    )
    found = export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0
    (tmp_path / "export/training.json").unlink()
    given = {name: part for name, part in tree(vocabulary).items() if name != "model"}
    import_directory(tmp_path / "export", tmp_path / "back", given)
    again = load_run(tmp_path / "back").model
    assert {name: getattr(again.config, name) for name in options} == options
    for name, weight in without_padding(model).items():
        assert torch.equal(without_padding(again)[name], weight)
    if not left:
        with pytest.raises(
            CheckpointError, match="has rotary positions, which the released layout does not have"
        ):
            export_run(tmp_path / "run", tmp_path / "old", ExportOptions(layout="released"))


def test_the_released_layout_has_no_modern_blocks(vocabulary, tmp_path):
    write_run(tmp_path / "run", tree(vocabulary, rms_norm=True))
    with pytest.raises(
        CheckpointError,
        match="has local layers, another norm or FFN, or no biases, which the released layout",
    ):
        export_run(tmp_path / "run", tmp_path / "old", ExportOptions(layout="released"))


@pytest.mark.parametrize("kind", BLOCK_POSITIONS)
def test_rotary_models_there_and_back(vocabulary, tmp_path, kind):
    """The export is proved as every other one; the same values in config.json make the same model again."""
    rotary = {"positions": "rotary", "block_positions": kind, "rotary_share": 0.5, "rotary_base": 100.0}
    model = write_run(tmp_path / "run", tree(vocabulary, **rotary))
    found = export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0
    described = json.loads((tmp_path / "export/config.json").read_text())
    assert {name: described[name] for name in rotary} == rotary
    (tmp_path / "export/training.json").unlink()  # config.json alone says what the model is
    given = {name: part for name, part in tree(vocabulary).items() if name != "model"}
    other = BLOCK_POSITIONS[BLOCK_POSITIONS.index(kind) - 1]
    with pytest.raises(
        ConfigError, match=f"model.block_positions is {other}, but .* has {kind}; use its conf"
    ):
        import_directory(
            tmp_path / "export", tmp_path / "other", given | {"model": {"block_positions": other}}
        )
    import_directory(tmp_path / "export", tmp_path / "back", given)
    again = load_run(tmp_path / "back").model
    assert {name: getattr(again.config, name) for name in rotary} == rotary
    for name, weight in without_padding(model).items():
        assert torch.equal(without_padding(again)[name], weight)


def test_rotary_positions_are_not_in_the_released_layout(vocabulary, tmp_path):
    write_run(tmp_path / "run", tree(vocabulary, positions="rotary"))
    with pytest.raises(
        CheckpointError, match=r"has rotary positions, which the released .* --layout huggingface"
    ):
        export_run(tmp_path / "run", tmp_path / "export", ExportOptions(layout="released"))
    assert not (tmp_path / "export").exists()


def test_the_card_says_what_was_trained(run, vocabulary, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    saved = copy / "checkpoints/step_00000000"
    content = json.loads((saved / "manifest.json").read_text())
    content["state"]["data"] = [{"documents": 3, "tokens": 99, "sha256": "abc", "weight": 1.0}]
    content["state"]["restarts"] = 4
    write_manifest(saved, content)
    records = [("train", 0, 9.0), ("validation", 0, 2.5), ("validation", 10, 1.5)]
    lines = [json.dumps({"kind": kind, "step": step, "loss": loss}) for kind, step, loss in records]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "validation", "st')
    export_run(copy, tmp_path / "export", ExportOptions(verify=False))
    card = (tmp_path / "export/README.md").read_text()
    fingerprint = json.loads((tmp_path / "export/training.json").read_text())["tokenizer"]["fingerprint"]
    for part in ("| restarts | 4 |", "| 3 | 99 | 1.0 | `abc` |", "| loss | 2.5000 |", "| 7 |", fingerprint):
        assert part in card
    everything = "".join(
        p.read_text() for p in (tmp_path / "export").iterdir() if p.suffix in (".json", ".md")
    )
    assert (
        str(vocabulary.parent) not in everything and str(tmp_path) not in everything
    )  # no paths of this machine


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        (['{"kind": "validation", "st', ("validation", 0, 2.5)], "| loss | 2.5000 |"),
        ([("validation", 1, 2.5), ("start", 0, None), ("train", 1, 9.0)], "No evaluation is recorded."),
        ([("validation", 0, None)], "| loss | not finite |"),
    ],
)
def test_the_card_has_the_evaluation_that_counts(run, tmp_path, records, shown):
    """Also behind a damaged line and with a loss that is no number, but not if a later start trained it again."""
    copy = shutil.copytree(run, tmp_path / "run")
    lines = [
        record
        if isinstance(record, str)
        else json.dumps(dict(zip(("kind", "step", "loss"), record, strict=True)))
        for record in records
    ]
    (copy / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    export_run(copy, tmp_path / "export", ExportOptions(verify=False))
    assert shown in (tmp_path / "export/README.md").read_text()


def test_a_model_with_other_heads_is_not_exported(vocabulary, tmp_path):
    settings = merge(tree(vocabulary), {"model": {"segments": 2}})
    write_run(tmp_path / "run", settings)
    with pytest.raises(
        CheckpointError, match=r"options that GLM's.*only models of GLM's own.*model.system bert"
    ):
        export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


def test_a_head_that_pools_is_refused_by_name(vocabulary, tmp_path):
    options = {"task_head": {"type": "classes", "classes": 2, "pool": "concat"}}
    task = {"name": "own", "kind": "classification", "reader": "jsonl", "labels": ["no", "yes"]}
    write_run(tmp_path / "run", merge(tree(vocabulary), {"model": options, "task": task}))
    with pytest.raises(
        CheckpointError, match=r"model\.task_head.pool concat, which no class of transformers has"
    ):
        export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


# Memory

MEASURE = """
import resource, sys
from pathlib import Path
import torch
sys.path[:0] = [{root!r}, {tests!r}]
from support.hf.hf_runs import settings_of, tree, make_config
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.transformer.flops import parameter_shapes

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def convert(name, **model):
    config = make_config(tree(Path({vocabulary!r}), **model))
    shapes = parameter_shapes(config.model)
    run = directory / name / "checkpoints" / "step_00000000"
    write_training_checkpoint(run, Weights(shapes, lambda n: torch.full(shapes[n], 0.5)), config)
    options = ExportOptions(max_shard_bytes={shard}, verify=False)
    export_run(directory / name, directory / (name + "_export"), options)
    import_directory(directory / (name + "_export"), directory / (name + "_back"), {{}}, verify=False)
    return sum(torch.Size(shape).numel() * 4 for shape in shapes.values())

directory = Path({directory!r})
convert("small")
footprint = peak()
total = convert("large", num_layers=6, hidden_size=512)
print(total, peak() - footprint)
"""


@pytest.mark.slow
def test_memory_stays_below_one_and_a_half_shards(vocabulary, tmp_path):
    """Export and import of a model three times the bound, beyond what a tiny model needs."""
    shard = 16_000_000
    places = {"root": str(ROOT), "tests": str(ROOT / "tests"), "vocabulary": str(vocabulary)}
    code = MEASURE.format(**places, directory=str(tmp_path), shard=shard)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    total, used = map(int, result.stdout.split())
    assert total > 3 * 1.5 * shard
    assert used <= 1.5 * shard


def test_a_vocabulary_without_glms_tokens_is_refused(vocabulary, tmp_path):
    published = {"tokenizer": {"added_tokens": "none"}, "objectives": {"causal": 1.0}}
    write_run(tmp_path / "run", merge(tree(vocabulary), published))
    with pytest.raises(CheckpointError, match=r"lacks eop, sop, .* tokenizer.added_tokens=glm"):
        export_run(tmp_path / "run", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()


def test_a_second_conversion_to_one_output_is_refused(tmp_path):
    """Their files would mix."""
    with new_directory(tmp_path / "out") as first:
        (first / "whole").touch()
        with pytest.raises(DataError, match="is being written by another process"):
            export_run(tmp_path / "run", tmp_path / "out", ExportOptions())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_ones_own_called_partial_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/notes.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out") as directory:
            (directory / "half").touch()
            raise ZeroDivisionError
    with new_directory(tmp_path / "out") as directory:
        (directory / "whole").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt", "out", "out.partial", "whole"]


def test_the_pipeline_fills_a_blank_after_a_span_of_all_block_positions(run, exports):
    """As BlankFiller does: the last token of a span that is cut there has no position."""
    directory, text = exports / "huggingface", "word1 [MASK] word2 [MASK] ."
    model = GLMForBlankInfilling.from_pretrained(directory).eval()
    longest = model.config.max_position
    opened = load_run(run)
    fast = exported_tokenizer(opened.tokenizer, directory)
    pipeline = BlankInfillingPipeline(model=model, tokenizer=fast)
    filled = pipeline(text, max_new_tokens=longest, min_new_tokens=longest - 1)
    filler = BlankFiller(
        opened.model, opened.tokenizer.special, GenerationConfig(max_length=longest, min_length=longest - 1)
    )
    spans = filler.fill(filler.context(opened.tokenizer.encode_with_specials(text)))
    assert filled["span_ids"] == spans and len(spans[0]) == longest
