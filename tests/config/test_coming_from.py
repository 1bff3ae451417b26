"""Arguments of other programs: each is answered with a setting that exists, and means the same wherever it is known."""

from __future__ import annotations

import re

import pytest
from support.commands import assert_refused, forked
from support.configs import tiny
from support.remedies import advised

from data_utils.common.errors import ConfigError
from data_utils.common.settings import leaves, setting_names, to_tree
from megatron_lite.config.coming_from import sources
from megatron_lite.config.deepspeed_table import table
from megatron_lite.config.foreign_options import explain_options, with_deepspeed_file
from megatron_lite.config.tree import Config

ROWS = [(source, row) for source, rows in sources().items() for row in rows]


def test_every_setting_of_the_tables_exists():
    names = {*setting_names(Config), *(f"deepspeed.{key}" for key in table().options)}
    sections = {name.rsplit(".", depth)[0] for name in names for depth in (1, 2)}
    assert [row for _, row in ROWS if not names | sections >= set(row.keys)] == []
    assert [row for _, row in ROWS if not row.setting and not row.note] == []


# What `{}` is replaced by, where 1 is none of the setting's values
VALUES = {
    "recompute_granularity": "full", "lr_decay_style": "linear", "lr_scheduler_type": "cosine",
    "hidden_dropout": "0.5", "attention_dropout": "0.5", "adam_beta1": "0.9", "adam_beta2": "0.9",
    "rotary_base": "500", "global_batch_size": "16", "seq_length": "64",
    **dict.fromkeys(("lora_dropout", "dropout"), "0.5"),
    "max_seq_length": "64", "zero_stage": "2", "label_smoothing_factor": "0.1",
    **dict.fromkeys(("save", "load", "output_dir", "experiment_name", "run_name", "wandb_exp_name"), "x"),
    **dict.fromkeys(("tokenizer_model", "wandb_project", "data_path", "valid_data_path"), "x"),
    **dict.fromkeys(("tokenizer_name_or_path", "wandb_entity", "pretrained_checkpoint"), "x"),
}  # fmt: skip


OVERRIDES = [row for _, row in ROWS if "=" in row.setting]


@pytest.mark.parametrize("row", OVERRIDES, ids=lambda row: row.names[0])
def test_an_answer_is_an_override_that_is_taken(row):
    settings = row.settings(VALUES.get(row.names[0], "1"))
    try:
        tiny(*(setting for setting in settings if "=" in setting))
    except ConfigError as error:  # another setting must fit it, or be given too
        assert not re.search(r"unknown|must be (a whole|a finite|true|text|one of|in |at )", str(error))


@pytest.mark.parametrize("source", sources())
def test_a_name_means_one_thing_in_a_program(source):
    names = [name for row in sources()[source] for name in row.names]
    assert len(names) == len(set(names))


def test_options_are_answered_all_at_once():
    line = [
        "--num-layers", "12", "--micro-batch-size=4", "--learning_rate", "1e-4", "--fp16", "--config", "x",
        "--max-position-embeddings", "1024", "--warmup", "-1", "--hidden-sise", "3", "--training.steps", "7",
        "--data-path", "a", "b", "optimizer.beta1=0.5", "--nothing-like-it",
    ]  # fmt: skip
    answer = explain_options(line, [word for word in line if word.startswith("--") and word != "--config"])
    for part in (
        "--num-layers 12 is model.num_layers=12;", "--micro-batch-size 4 is batch.micro_batch_size=4;",
        "--learning_rate 1e-4 is optimizer.lr=1e-4;", "--fp16 is training.precision=fp16;",
        "--max-position-embeddings 1024 is model.max_position=1023;", "schedule.warmup_steps (in steps",
        "model.hidden_size", "--training.steps 7 is training.steps=7", "--nothing-like-it is not known",
    ):  # fmt: skip
        assert part in answer
    assert "\n" not in answer and "--config" not in answer and "beta1" not in answer


# Command lines -> what the other program trains with them, in the settings here that are not the defaults.
TRAINED = {
    "--swiglu": {"model.ffn": "gated", "model.activation": "silu"},
    "--hidden-dropout 0.5": {"model.output_dropout": 0.5, "model.embedding_dropout": 0.5},
    "--post-mlp-layernorm": {"model.sandwich_norm": True},
    "--sandwich-ln": {"model.sandwich_norm": True},
    "--disable-bias-linear": {"model.biases": "none"},
    "--lr_scheduler_type cosine": {"schedule.min_lr_ratio": 0.0},
    "--tokenizer-name-or-path x": {"tokenizer.kind": "hf_json", "tokenizer.path": "x"},
    "--lr-decay-style linear": {"schedule.kind": "linear", "schedule.min_lr_ratio": 0.0},
    "--lr-decay-style WSD": {"schedule.min_lr_ratio": 0.0},
    "--window-size 4": {}, "--add-qkv-bias": {}, "--zero-stage 0": {},
    "--spec a b": {}, "--rotary-interleaved": {}, "--decoder-seq-length 9": {}, "--lr-warmup-init 0.1": {},
    "--recompute-modules mlp": {},
}  # fmt: skip


@pytest.mark.parametrize("line", TRAINED)
def test_an_answer_that_is_pasted_trains_the_same(line):
    answer = explain_options(line.split(), line.split()[:1])
    before, after = (dict(leaves(to_tree(config))) for config in (tiny(), tiny(*advised(answer))))
    changed = {key: after[key] for key in TRAINED[line]}
    assert "not known" not in answer and changed == TRAINED[line]
    rest = before.keys() - TRAINED[line].keys() - {"tokenizer"}
    assert [key for key in rest if before[key] != after[key]] == []


def test_a_name_of_several_settings_is_answered_with_all():
    assert "is one of optimizer.kind, schedule.kind, " in explain_options(["--kind", "x"], ["--kind"])


def test_options_of_lora_are_answered():
    """As TRL takes them: what is a setting, and what is not implemented."""
    line = [
        "--use_peft",
        "--lora_r",
        "8",
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "--use_rslora",
        "--use_dora",
    ]
    answer = explain_options(line, [word for word in line if word.startswith("--")])
    for part in ("--lora_r 8 is model.lora.rank=8;", "model.lora.targets (", "rank_stabilized=true;"):
        assert part in answer
    assert re.search(r"--use_dora: .* not implemented", answer)


MIXTURES = {
    ("0.7", "a", "0.3", "b"): "[{prefix: a, weight: 0.7}, {prefix: b, weight: 0.3}]",
    ("a", "b"): "[{prefix: a}, {prefix: b}]",
    ("a",): "[{prefix: a}]",
}


@pytest.mark.parametrize("values", MIXTURES)
def test_a_blend_of_datasets_is_answered_with_a_mixture_that_is_taken(values):
    answer = explain_options(["--data-path", *values], ["--data-path"])
    found = re.search(r"data\.train=\[.*\](?= )", answer)
    assert found and tiny(found[0]).data.train == tiny(f"data.train={MIXTURES[values]}").data.train


def test_a_value_of_another_name_is_answered_with_its_name_here():
    assert "WSD is schedule.parts" in explain_options(["--lr-decay-style", "WSD"], ["--lr-decay-style"])


# What a script of Megatron-LM passes besides sizes: https://github.com/NVIDIA/Megatron-LM, its arguments by purpose
UNLIKE_OURS = [
    "--moe-router-topk", "8", "--moe-any-new-option", "--no-gradient-accumulation-fusion",
    "--log-memory-to-tensorboard", "--transformer-impl", "local", "--lr-warmup-samples", "5",
    "--exit-duration-in-mins", "1190", "--data-impl", "mmap",
    "--deepspeed", "--merge-file", "m.txt", "--no-load-rng", "--reset-position-ids", "--attention-softmax-in-fp32",
    "--fp8-format", "hybrid",
]  # fmt: skip


def test_options_of_megatron_are_known_by_name_or_by_their_beginning():
    names = [word for word in UNLIKE_OURS if word.startswith("--")]
    answer = explain_options(UNLIKE_OURS, names)
    assert "not known" not in answer and all(name in answer for name in names)


def test_a_flag_that_is_off_is_left_out():
    assert "--bf16 False: leave it out" in explain_options(["--bf16", "False"], ["--bf16"])


def test_the_trainers_form_of_a_deepspeed_file():
    assert with_deepspeed_file(["--deepspeed", "ds.json", "a.b=1"]) == [
        "--deepspeed_config",
        "ds.json",
        "a.b=1",
    ]
    assert with_deepspeed_file(["--deepspeed=ds.json"]) == ["--deepspeed_config=ds.json"]
    for untouched in (["--deepspeed", "a.b=1"], ["--deepspeed", "--config", "x"], ["--deepspeed"]):
        assert with_deepspeed_file(untouched) == untouched


@pytest.mark.parametrize(
    "second", [["--deepspeed_config=b.json"], ["--deepspeed", "b.json"], ["--deepspeed=b.json"]]
)
def test_a_second_deepspeed_file_is_refused(second):
    with pytest.raises(ConfigError, match="given twice"):
        with_deepspeed_file(["--deepspeed_config", "a.json", *second])


# Small files in the shape of other programs'. A DeepSpeed file is JSON: one key of it makes no other file one.
FOREIGN = {
    "axolotl.yaml": "base_model: a/b\nmodel_type: Llama\ndatasets: [{path: c, type: completion}]\nsequence_len: 2048\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 4\noptimizer: adamw_torch\nbf16: auto\ndeepspeed: ds.json\n",
    "cramming.yaml": "defaults: [{arch: bert}, {train: bert}, _self_]\nbase_dir: outputs\nseed: 1\nbudget: 24\n"
    "dryrun: false\ndata: {vocab_size: 32768}\nwandb: {enabled: false}\nimpl: {microbatch_size: 128}\n",
    "nemo.yaml": "name: bert\ntrainer: {devices: 1, precision: 16}\nexp_manager: {exp_dir: null}\nmodel: "
    "{num_layers: 12, hidden_size: 768, encoder_seq_length: 512, optim: {name: fused_adam, lr: 2e-4}}\n",
    "litgpt.yaml": "model_name: pythia\nout_dir: out\nprecision: bf16-mixed\ndata: {class_path: x}\n"
    "train: {max_tokens: 9}\neval: {interval: 9}\noptimizer: {class_path: torch.optim.AdamW}\n",
    "fairseq.yaml": "common: {fp16: true}\ncheckpoint: {x: 1}\ntask: {_name: masked_lm}\ncriterion: masked_lm\n"
    "dataset: {batch_size: 16}\noptimizer: {_name: adam}\nlr_scheduler: {_name: fixed}\noptimization: {lr: [5e-4]}\n",
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 8\n",
    "neox.yml": '{"pipe_parallel_size": 1, "num_layers": 12, "optimizer": {"type": "Adam"}, "zero_optimization": '
    '{"stage": 1}, "fp16": {"enabled": true}, "train_micro_batch_size_per_gpu": 4}',
    "training_args.json": '{"output_dir": "out", "fp16": true, "bf16": false, "seed": 1, "optim": "adamw_torch", '
    '"gradient_accumulation_steps": 2, "deepspeed": null, "max_steps": 9, "learning_rate": 5e-5}',
    "config.json": '{"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "dtype": "float32"}',
    "torchtitan.toml": '[job]\ndump_folder = "out"\n\n[training]\nsteps = 10\n',
    "ds_block_base.sh": '#! /bin/bash\ngpt_options=" --block-lm --num-layers 12 --fp16 "\n',
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "script"),
    [*((name, "pretrain_glm.py") for name in FOREIGN), ("axolotl.yaml", "scripts/finetune.py")],
)
def test_a_file_of_another_program_is_answered_in_one_short_line(name, script, tmp_path):
    path = tmp_path / name
    path.write_text(FOREIGN[name])
    run = ["--output", tmp_path / "run"] if "finetune" in script else []
    done = forked(script, "--config", path, *run)
    assert_refused(done, "docs/coming_from.md")
    assert name in done.stderr and "DeepSpeed file" not in done.stderr
    assert len(done.stderr) - len(str(path)) < 300 and not (tmp_path / "run").exists()
