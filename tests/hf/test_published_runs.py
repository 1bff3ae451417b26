"""A directory of a published system becomes a run, and a run becomes the same directory again."""

import json
import math
import shutil

import pytest
import transformers
from safetensors.torch import load_file, save_file
from support.distributed import run_ranks
from support.hf.published_files import (
    FOR_OTHER_VERSIONS,
    OBJECTIVE,
    TOKENIZER_FILES,
    TREE,
    assert_same_tensors,
    edit,
    write_directory,
)
from support.selection import slow_but
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
from megatron_lite.hf.published import verify as published_verify
from megatron_lite.hf.published.segment_memory import read_segment
from megatron_lite.inference.open_run import open_run

SENTENCE = "The quick brown fox jumps over the lazy dog."


USUAL = ("bert", "roberta", "bart", "gpt2", "glm4", "t5", "xlnet", "modernbert", "qwen3", "glm4_moe", "olmoe")


@pytest.fixture(scope="module", params=slow_but(USUAL, OBJECTIVE))
def imported(request, tmp_path_factory):
    """The case, the original directory, and the run made from it."""
    root = tmp_path_factory.mktemp("published")
    write_directory(request.param, root / "original")
    tree = TREE | OBJECTIVE[request.param]
    proof = import_directory(root / "original", root / "run", tree)
    assert proof is not None and proof.largest_difference <= proof.limit(1e-5)
    return request.param, root / "original", root / "run"


def test_every_tensor_and_file_comes_back(imported, tmp_path, caplog):
    case, original, run = imported
    proof = export_run(run, tmp_path / "export", ExportOptions())
    is_trained_otherwise = "GlmForCausalLM reads texts from left to right, but" in caplog.text
    assert is_trained_otherwise == (case == "glm4")  # on blank infilling
    assert proof is not None and proof.agreement == 1.0
    assert_same_tensors(tmp_path / "export", original)
    described = [json.loads((path / "config.json").read_text()) for path in (original, tmp_path / "export")]
    differing = {
        k for k in described[0].keys() | described[1].keys() if described[0].get(k) != described[1].get(k)
    }
    untied = {"tie_word_embeddings"} if case in ("t5_1_1", "mt5") else set()  # the class writes that it ties
    assert differing <= {"transformers_version"} | FOR_OTHER_VERSIONS | untied
    for name in TOKENIZER_FILES:
        assert (original / name).exists() == (tmp_path / "export" / name).exists()
        if (original / name).exists():
            assert (original / name).read_bytes() == (tmp_path / "export" / name).read_bytes()
    card = (tmp_path / "export/README.md").read_text()
    model = getattr(transformers, described[1]["architectures"][0]).from_pretrained(tmp_path / "export")
    skipped = {**dict.fromkeys(("roberta", "xlm_roberta", "camembert"), 2), "bart": 4}.get(
        case, 0
    ) * 48  # rows that no token uses
    count = sum(parameter.numel() for parameter in set(model.parameters())) - skipped
    count += sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    for part in (
        f"{count:,} parameters",
        f"class `{type(model).__name__}`",
        "| run | run |",
        "| step | 0 of 6 |",
    ):
        assert part in card
    assert (
        "were imported, and were not trained further" in card and "data and of the imported weights" in card
    )
    assert str(tmp_path) not in card and str(run.parent) not in card
    ours = open_run(run).tokenizer
    if case != "roberta":  # the class of transformers cannot split words by a vocabulary without merges
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
        assert theirs(SENTENCE, add_special_tokens=False)["input_ids"] == ours.encode(SENTENCE)


@pytest.mark.parametrize("imported", ["bert", "gpt2", "glm4"], indirect=True)
def test_an_export_serves_the_pipeline_of_transformers(imported, tmp_path):
    case, _, run = imported
    export_run(run, tmp_path / "export", ExportOptions(verify=False))
    if case in ("gpt2", "glm4"):
        pipeline = transformers.pipeline("text-generation", str(tmp_path / "export"))
        assert len(pipeline("the fox", max_new_tokens=3, do_sample=False)[0]["generated_text"]) > len(
            "the fox"
        )
        return
    pipeline = transformers.pipeline("fill-mask", str(tmp_path / "export"))
    answers = pipeline("the quick [MASK] fox")
    assert len(answers) == 5 and sum(answer["score"] for answer in answers) <= 1.0


def saved_again(context, run, output, parallel):
    """Continue a run in another layout, and save it."""
    tree = load_yaml(run / "config.yaml") | {"parallel": parallel}
    engine = make_engine(build(Config, tree), context, len(LOSSES))
    load_checkpoint(read_checkpoint(run / "checkpoints" / checkpoint_name(0)), engine, context)
    state = TrainerState.at_step_0(tree).to_json()
    save_checkpoint(output / "checkpoints", 1, engine, state, context)


ODD = ("albert", "ernie2", "deberta_v3, odd")  # three heads


def each_layout():
    """Some systems in a layout each; in slow runs all of them on two tensor-parallel ranks, two stages, and ZeRO 3.

    Mixtures of experts have no ZeRO 3, but ranks that split the experts; OLMoE's norm needs all heads on a rank.
    """
    few = {
        "bert": layout(2, 2), "gpt2": layout(2, zero=3), "t5": layout(2, zero=3), "bart": layout(pp=2),
        "xlnet": layout(2, 2), "glm4": layout(2, zero=3), "qwen3": layout(2, 2), "neobert": layout(2, zero=3),
        "modernbert": layout(pp=2), "deberta_v3": layout(2, 2), "glm4_moe": layout(2, pp=2, ep=2),
    }  # fmt: skip
    for case, parallel in few.items():
        yield pytest.param(case, parallel, marks=() if case in ("bert", "modernbert") else pytest.mark.slow)
    for case in (*OBJECTIVE, "neobert", "deberta_v3, odd"):
        layouts = [layout(ep=2) if "moe" in case else layout(zero=3)]
        layouts += [layout(2)] * (case not in (*ODD, "olmoe"))
        layouts += [layout(pp=2)] * (case != "albert")  # whose blocks share all
        for parallel in layouts:
            yield pytest.param(case, parallel, marks=pytest.mark.slow)


@pytest.mark.parametrize(("case", "parallel"), each_layout())
def test_every_layout_gives_the_directory_back(case, parallel, tmp_path):
    write_directory(case, tmp_path / "original")
    tree = TREE | OBJECTIVE.get(case, {"objectives": {"masked_lm": 1}})
    import_directory(tmp_path / "original", tmp_path / "run", tree, verify=False)
    shutil.copytree(tmp_path / "run", tmp_path / "again", ignore=shutil.ignore_patterns("checkpoints"))
    sizes = ("tensor", "pipeline", "expert")
    ranks = max(2, math.prod(parallel[f"{name}_parallel_size"] for name in sizes))
    run_ranks(
        saved_again,
        ranks,
        tmp_path / "run",
        tmp_path / "again",
        parallel,
        parallel=ParallelConfig(**parallel),
    )
    has_class = case != "neobert"
    export_run(tmp_path / "again", tmp_path / "export", ExportOptions(verify=has_class))
    trained = f"were imported, and trained further on {next(iter(tree['objectives']))}."
    assert trained in (tmp_path / "export/README.md").read_text()
    assert_same_tensors(tmp_path / "export", tmp_path / "original")


def untie(directory):
    state = load_file(directory / "model.safetensors")
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"] + 1
    save_file(state, directory / "model.safetensors", {"format": "pt"})


def lose(directory):
    state = load_file(directory / "model.safetensors")
    del state["bert.encoder.layer.1.intermediate.dense.bias"]
    save_file(state, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "tree", "parts"),
    [
        (lambda d: edit(d, architectures=["BertForQA"]), {}, ("'BertForQA'", "BertForPreTraining, BertForMaskedLM")),
        (lambda d: edit(d, is_decoder=True), {}, ("is_decoder is True", "only False")),
        (lambda d: edit(d, hidden_act="tanh"), {}, ("hidden_act is 'tanh'", "one of gelu")),
        (untie, {}, ("cls.predictions.decoder.weight differs", "tied")),
        (lose, {}, ("lacks bert.encoder.layer.1.intermediate.dense.bias",)),
        (lambda d: edit(d, num_hidden_layers=2), {}, ("also has bert.encoder.layer.2.* (16)", "fetch config.json")),
        (lambda d: edit(d, intermediate_size=64), {}, ("has shape [192, 48], but the model needs [64, 48]",)),
        (lambda d: (d / "vocab.txt").unlink(), {}, ("no tokenizer", "set tokenizer.kind")),
        (lambda d: None, {"model": {"norm": "pre"}}, ("model.norm is 'pre'", "has 'post'")),
        (lambda d: None, {"model": {"hidden_size": 64}}, ("model.hidden_size is 64",)),
        (lambda d: None, {"data": {"sequence_length": 400}}, ("position ids up to", "sequence_length")),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path, change, tree, parts):
    write_directory("bert", tmp_path / "bert")
    change(tmp_path / "bert")
    with pytest.raises((CheckpointError, ConfigError)) as error:
        import_directory(tmp_path / "bert", tmp_path / "run", TREE | OBJECTIVE["bert"] | tree)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message
    assert not (tmp_path / "run").exists()


def test_unilm_begins_with_a_bert_of_six_segments(tmp_path):
    write_directory("unilm", tmp_path / "original")
    tree = TREE | OBJECTIVE["unilm"] | {"model": {"system": "unilm"}}
    import_directory(tmp_path / "original", tmp_path / "run", tree)
    assert open_run(tmp_path / "run").config.model.system == "unilm"
    write_directory("bert, masked LM", tmp_path / "bert")
    with pytest.raises(ConfigError, match=r"model\.segments is 2, but the objectives use 6"):
        import_directory(tmp_path / "bert", tmp_path / "other", tree)


def test_spanbert_begins_with_a_bert(tmp_path):
    """Its boundary head is new, is trained, and is written to a file of its own, as transformers' class has none."""
    write_directory("bert, masked LM", tmp_path / "bert")
    tree = TREE | {"objectives": {"spanbert": 1}, "model": {"system": "spanbert"}}
    import_directory(tmp_path / "bert", tmp_path / "run", tree)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert "`other_heads.safetensors` holds" in (tmp_path / "export/README.md").read_text()
    extra = load_file(tmp_path / "export/other_heads.safetensors")
    assert extra["heads.span_boundary.place_embeddings.weight"].shape == (20, 200)
    assert {name.split(".")[1] for name in extra} == {"span_boundary", "boundary_bias"}


def test_an_import_of_xlnet_is_proved_with_its_memory(tmp_path, monkeypatch):
    """The class's own mem_len and reuse_len count; a memory that is forgotten is noticed."""
    write_directory("xlnet", tmp_path / "xlnet")
    edit(tmp_path / "xlnet", mem_len=30, reuse_len=50)
    import_directory(tmp_path / "xlnet", tmp_path / "run", TREE | OBJECTIVE["xlnet"])
    monkeypatch.setattr(
        published_verify,
        "read_segment",
        lambda model, fields, memory=None, **sizes: read_segment(model, fields, **sizes),
    )
    with pytest.raises(CheckpointError, match="the import of"):
        import_directory(tmp_path / "xlnet", tmp_path / "other", TREE | OBJECTIVE["xlnet"])


def test_samples_fit_the_published_positions_where_no_length_is_given(tmp_path):
    """The usual 512 tokens with CLS and two SEP would not fit BERT's 512 places, as a stranger would import it."""
    write_directory("bert", tmp_path / "bert")
    places = json.loads((tmp_path / "bert/config.json").read_text())["max_position_embeddings"]
    tree = {name: value for name, value in (TREE | OBJECTIVE["bert"]).items() if name != "data"}
    import_directory(tmp_path / "bert", tmp_path / "run", tree)
    config = open_run(tmp_path / "run").config
    assert config.data.sequence_length == places - 3 and config.row_length == places
