"""A released directory is imported and trained by the two commands of the README, without an option."""

import json
import math
import shlex

import pytest
import transformers
import yaml
from support.commands import forked
from support.data.tokenizer_files import byte_bpe_json
from support.hf.published import random_model
from support.hf.published_files import write_directory, write_released
from support.hf.published_tokenizers import SCRIPTS
from support.project import ROOT

from data_utils.common.setting_files import load_yaml
from data_utils.dataset.indexed_dataset import IndexedDataset
from megatron_lite.config.systems import CAUSAL, ENCODER_DECODERS, SYSTEMS, with_objective
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME

MASKED = {"masked_lm": {"next_sentence": False}}
# Case -> sections of its recipe, tokens of a sample, samples of a micro-batch.
CHOSEN = {
    "bert": ({"masked_lm": {"next_sentence": True}}, 509, 8),
    "gpt2": ({"causal": {"begin": "eos"}}, 1024, 4),
    "t5": ({"t5": {"sentinel_first": None}}, 512, 8),
    "bert, masked LM": (MASKED, 509, 8),
    **dict.fromkeys(("roberta", "xlm_roberta", "camembert", "electra_generator"), (MASKED, 509, 8)),
    "deberta_v3": (MASKED, 512, 8),
    "eurobert": (MASKED, 2045, 2),
    "modernbert": ({"masked_lm": {"masked_ratio": 0.3}}, 2045, 2),
    "albert": ({"albert": {"sentence_order": True}}, 509, 8),
    "albert, odd": ({"albert": {"sentence_order": False}}, 509, 8),
    "ernie": ({"ernie": {"next_sentence": True}}, 509, 8),
    "ernie2": ({"ernie": {"next_sentence": True}}, 510, 8),
    "gpt": ({"causal": {}}, 512, 8),
    **dict.fromkeys(("llama", "mistral"), ({"causal": {"begin": "cls"}}, 2048, 2)),
    **dict.fromkeys(("qwen2", "qwen3"), ({"causal": {"begin": "none"}}, 2048, 2)),
    **dict.fromkeys(("glm4", "glm4_0414", "modernbert_decoder"), ({"causal": {}}, 2048, 2)),
    "bart": ({"bart": {"predict_cls": True}}, 1023, 4),
    "t5_1_1": ({"t5": {}}, 512, 8),
    "mt5": ({"t5": {}}, 512, 8),
    "xlnet": ({"xlnet": {}}, 512, 8),
}
FEW = ("gpt2",)  # the tests below import BERT


# Of a pair, of two stacks, or another use of the architecture.
NOT_CHOSEN = {"electra", "unilmv2", "optimus", "ul2", "masked_diffusion", "entities", "blank_infilling"}


def recipes_of_published_systems():
    """A recipe of configs/ and the first of its objectives."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        recipe = load_yaml(path)
        name = next(iter(recipe.get("objectives") or ["blank_infilling"]))
        if recipe["model"].get("system", "glm") in SYSTEMS_BY_NAME and name not in NOT_CHOSEN:
            yield pytest.param(recipe, name, id=path.stem)


@pytest.mark.parametrize(("recipe", "name"), recipes_of_published_systems())
def test_an_import_continues_on_the_objective_of_the_recipe(recipe, name):
    """With those settings of the objective's section that the import chooses."""
    model = {key: value for key, value in recipe["model"].items() if key != "vocab_size"}
    chosen = with_objective({"model": model})
    assert [*chosen["objectives"]] == [name]
    given = {key: value for key, value in recipe.get(name, {}).items() if key in chosen[name]}
    assert given == {key: chosen[name][key] for key in given}
    assert chosen.get("training", {}).items() <= recipe["training"].items()


def test_systems_read_texts_as_their_classes_do():
    for name, system in SYSTEMS_BY_NAME.items():
        if name in SYSTEMS:
            kinds = (name in CAUSAL, name in ENCODER_DECODERS)
            assert kinds == (system.is_causal, system.is_encoder_decoder), name


def line_of(done, beginning):
    """The command that a line of the output gives."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{beginning}: ")]
    return shlex.split(line.partition(": ")[2])


def succeeded(command, **options):
    assert command[0] == "python"
    done = forked(*command[1:], **options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CHOSEN]
)
def test_a_released_directory_needs_no_option(case, tmp_path):
    write_released(case, tmp_path / "released")
    run = tmp_path / "run"
    done = forked(
        "scripts/convert_checkpoint.py", "import", "--input", tmp_path / "released", "--output", run
    )
    assert done.returncode == 0, done.stderr
    sections, length, micro = CHOSEN[case]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["objectives"] == dict.fromkeys(sections, 1.0)
    for name, section in sections.items():
        assert {key: config[name][key] for key in section} == section
    assert config["data"]["sequence_length"] == length
    assert (config["batch"]["micro_batch_size"], config["batch"]["global_batch_size"]) == (micro, 16)
    assert (config["schedule"]["warmup_steps"], config["training"]["steps"]) == (100, 1000)
    assert (
        f"{run / 'config.yaml'} trains {next(iter(sections))} on samples of {length:,} tokens" in done.stdout
    )

    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SCRIPTS * 20))
    places = {"FILE": str(tmp_path / "text.jsonl"), "data/corpus": str(tmp_path / "corpus")}
    succeeded([places.get(part, part) for part in line_of(done, "next")])
    train = [part.replace("data/corpus", places["data/corpus"]) for part in line_of(done, "then")]
    cheaper = f"batch.global_batch_size={micro}", "run.tensorboard=false", "run.log_interval=1"
    trained = succeeded([*train, "training.steps=10", *cheaper])
    assert "schedule.warmup_steps is scaled to 1 for training.steps=10" in trained.stdout
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 10 and all(map(math.isfinite, losses))


@pytest.mark.parametrize("length", [pytest.param(256, marks=pytest.mark.slow), 512])
def test_a_released_directory_is_tuned_and_measured_as_it_stands(length, tmp_path):
    """Inputs of a task may have as many tokens as there are positions, special ones counted."""
    write_released("bert", tmp_path / "released")
    rows = [{"text": f"the quick brown fox {i % 7}", "label": "ab"[i % 2]} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "name": "mine",
        "kind": "classification",
        "reader": "jsonl",
        "labels": ["a", "b"],
        "sequence_length": length,
    }
    files = {"train": str(tmp_path / "rows.jsonl"), "validation": [str(tmp_path / "rows.jsonl")]}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({"task": {**task, **files}}))
    of_task = "--task", tmp_path / "task.yaml"
    tuned = tmp_path / "tuned"
    settings = "finetune.epochs=1", "training.precision=fp32"
    finetune = [
        "python",
        "scripts/finetune.py",
        "--checkpoint",
        tmp_path / "released",
        *of_task,
        "--output",
        tuned,
    ]
    succeeded([*finetune, *settings])
    (best,) = tuned.glob("seed_*/best")
    export = [
        "python",
        "scripts/convert_checkpoint.py",
        "export",
        "--checkpoint",
        best,
        "--output",
        tmp_path / "hf",
    ]
    succeeded([*export, "--no-verify"])
    expected, found = (
        succeeded(["python", "scripts/evaluate.py", "--checkpoint", path, *of_task]).stdout.split()[-1]
        for path in (tuned, tmp_path / "hf")
    )
    assert expected == found


def test_the_commands_of_an_imported_task_head_run(tmp_path):
    """With 160 positions, fewer than the inputs of a task usually have."""
    source, run, rows = tmp_path / "classifier", tmp_path / "run", tmp_path / "rows.jsonl"
    write_directory("bert", source)
    config = transformers.BertConfig.from_pretrained(source, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(source)
    imported = forked("scripts/convert_checkpoint.py", "import", "--input", source, "--output", run)
    assert imported.returncode == 0, imported.stderr
    records = [{"text": f"word {i % 5}", "label": f"LABEL_{i % 3}"} for i in range(12)]
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    for beginning in ("next", "or"):
        succeeded([part.replace("FILE", str(rows)) for part in line_of(imported, beginning)])
    results = json.loads((tmp_path / "run-tuned/results.json").read_text())
    assert str(rows) in json.dumps(results)


BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("system", "begins"),
    [
        ("llama", True),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
    ],
)
def test_special_tokens_of_unusual_names_are_those_of_the_class(system, begins, tmp_path):
    """As in DeepSeek's Llamas and Qwens; a beginning that the class does not put before a text is none."""
    source, run = tmp_path / "released", tmp_path / "run"
    source.mkdir()
    described = byte_bpe_json([BEGIN, END])
    ids = {name: described["model"]["vocab"][name] for name in (BEGIN, END)}
    special = {BEGIN: {"id": BEGIN, "ids": [ids[BEGIN]], "tokens": [BEGIN]}}
    single = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}] * begins + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    described["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special,
    }  # fmt: skip
    if system == "qwen2":  # whose class splits texts its own way
        pipeline = json.loads(transformers.Qwen2Tokenizer().backend_tokenizer.to_str())
        described |= {key: pipeline[key] for key in ("normalizer", "pre_tokenizer")}
    (source / "tokenizer.json").write_text(json.dumps(described))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    of_config = {"bos_token_id": ids[BEGIN], "eos_token_id": ids[END]}
    size = len(described["model"]["vocab"]) + 9  # rows for what the class may add
    model = random_model(system, vocab_size=size, max_position_embeddings=64)
    model.config.update(of_config)
    model.save_pretrained(source)

    imported = succeeded(
        ["python", "scripts/convert_checkpoint.py", "import", "--input", source, "--output", run]
    )
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["tokenizer"]["roles"] == ({"eos": END, "cls": BEGIN} if begins else {"eos": END})
    assert config["causal"]["begin"] == ("cls" if begins else "none")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SCRIPTS * 20))
    places = {"FILE": str(tmp_path / "text.jsonl"), "data/corpus": str(tmp_path / "corpus")}
    succeeded([places.get(part, part) for part in line_of(imported, "next")])
    dataset = IndexedDataset(tmp_path / "corpus")
    assert {int(dataset.document(i)[-1]) for i in range(len(dataset))} == {ids[END]}
    train = [part.replace("data/corpus", places["data/corpus"]) for part in line_of(imported, "then")]
    succeeded([*train, "training.steps=2", "batch.global_batch_size=8", "run.tensorboard=false"])
    exported = tmp_path / "exported"
    succeeded(
        ["python", "scripts/convert_checkpoint.py", "export", "--checkpoint", run, "--output", exported]
    )
    written = json.loads((exported / "config.json").read_text())
    assert {key: written[key] for key in of_config} == of_config
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(path) for path in (source, exported))
    assert theirs("a b")["input_ids"] == ours("a b")["input_ids"]
