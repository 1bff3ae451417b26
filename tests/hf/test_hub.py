"""Names of the Hugging Face hub where directories are expected, against a hub on the loopback."""

import json
import multiprocessing
import shutil

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import save
from support.commands import assert_refused, forked, python
from support.data.tokenizer_files import bert_vocab, write_bert
from support.hf.hub import Hub
from support.hf.published_files import write_released

from data_utils.common.errors import DataError
from data_utils.common.hub import HubName, fetch, hub_name
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.hf.common.hub_files import wanted
from megatron_lite.hf.importing import import_directory

CONVERT = "scripts/convert_checkpoint.py"
SECRET = "hf_TheSecretOfThisTest"
NAME = "google-bert/bert-base-uncased"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A model's directory as released, with files that no import needs."""
    directory = tmp_path_factory.mktemp("released")
    write_released("bert", directory)
    for name in ("pytorch_model.bin", "flax_model.msgpack", "onnx/model.onnx", "README.md"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"of another program")
    return directory


@pytest.fixture
def hub(released, tmp_path, monkeypatch):
    hub = Hub(token=SECRET)
    hub.add(NAME, released)
    with hub.running(monkeypatch, tmp_path / "cache"):
        yield hub


def imported(name, tmp_path, *options, **variables):
    arguments = "import", "--input", name, "--output", tmp_path / "run", "--no-verify", *options
    return forked(CONVERT, *arguments, cwd=tmp_path, **variables)


def assert_no_secret(tmp_path, *done):
    assert not any(SECRET in text for one in done for text in (one.stdout, one.stderr))
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAME, HubName(NAME)),
        ("a/b@v1.0", HubName("a/b", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("bert-base-uncased", HubName(NAME)),
        ("gpt2", HubName("openai-community/gpt2")),
        ("gpt2-xl@main", HubName("openai-community/gpt2-xl", "main")),
        ("xlm-roberta-base", HubName("FacebookAI/xlm-roberta-base")),
        ("here/model@main", HubName("here/model", "main")),
        ("distilroberta-base", HubName("distilbert/distilroberta-base")),
        *(
            (path, None)
            for path in ("here/model", "here", "./a/b", "../a", "/a/b", "a/b/c", "a", "a/b--c", "a/..", "")
        ),
        *(
            (path, None)
            for path in (
                "data/bert-base-uncased",
                "runs/x",
                "tokenizer/tokenizer.json",
                "here/missing",
                "a/-b",
                "a/b@",
                "a b/c",
            )
        ),
    ],
)
def test_what_is_a_name_and_what_a_path(text, expected, tmp_path, monkeypatch):
    """What exists goes first, and what is missing in an existing folder is a path too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/model").mkdir(parents=True)
    assert hub_name(text) == expected


# Import


@pytest.mark.parametrize("name", [NAME, "bert-base-uncased"])
def test_a_name_is_imported_with_the_files_it_needs_and_its_commit(name, hub, tmp_path):
    (commit,) = hub.repositories[NAME]
    done = imported(name, tmp_path, HF_TOKEN=SECRET)
    assert done.returncode == 0, done.stderr
    assert sorted(hub.downloads()) == ["config.json", "tokenizer_config.json", "vocab.txt"]
    assert f"--input {name}: {NAME}@{commit} of the hub" in done.stdout
    assert json.loads((tmp_path / "run/source.json").read_text()) == {"repository": NAME, "commit": commit}
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["tokenizer"]["path"].startswith(str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "cache")  # the run has all that it needs
    assert load_tokenizer(TokenizerConfig(**config["tokenizer"])).vocab_size == len(bert_vocab())
    assert_no_secret(tmp_path, done)


def test_a_revision_is_that_commit_and_a_later_import_needs_no_network(hub, tmp_path, monkeypatch):
    (first,) = hub.repositories[NAME]
    hub.commit(NAME, {"config.json": b"broken since"})
    done = imported(f"{NAME}@{first}", tmp_path)
    assert done.returncode == 0 and f"{NAME}@{first} of the hub" in done.stdout
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    shutil.rmtree(tmp_path / "run")
    assert imported(f"{NAME}@{first}", tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "run")
    assert_refused(imported(NAME, tmp_path), f"hf download {NAME} --local-dir DIR")
    assert len(hub.asked) == asked


def test_shards_are_fetched_by_their_index(hub, tmp_path):
    index = {"weight_map": {"x": "model-1-of-2.safetensors", "y": "model-2-of-2.safetensors"}}
    shards = {f"model-{i}-of-2.safetensors": b"%d" % i for i in (1, 2)}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    hub.commit("a/sharded", {**files, "pytorch_model.bin": b"older", "model-3-of-2.safetensors": b"stray"})
    found = fetch(HubName("a/sharded"), "--input", "DIR", wanted)
    assert {path.name for path in found.directory.iterdir()} == files.keys()
    hub.commit("a/lacking", {name: content for name, content in files.items() if "2-of" not in name})
    with pytest.raises(DataError, match=r"model-2-of-2\.safetensors is not among its files"):
        fetch(HubName("a/lacking"), "--input", "DIR", wanted)
    hub.commit("a/none", {"config.json": b"{}", "weights.gguf": b"x"})
    with pytest.raises(DataError, match=r"model\.safetensors is not among its files"):
        fetch(HubName("a/none"), "--input", "DIR", wanted)


def test_an_export_of_this_project_comes_in_from_the_files_that_are_fetched(exports, tmp_path):
    source = exports / "huggingface"
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    for name in wanted(names, lambda name: json.loads((source / name).read_text())):
        (tmp_path / "fetched" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, tmp_path / "fetched" / name)
    assert not any(path.suffix == ".py" for path in tmp_path.rglob("*"))
    assert import_directory(tmp_path / "fetched", tmp_path / "run", {}) is not None


@pytest.mark.parametrize("parts", [("generator", "discriminator"), ("encoder", "decoder")])
def test_both_parts_of_a_pair_are_fetched(parts):
    each = ("config.json", "model.safetensors", "vocab.txt")
    names = {f"{part}/{name}" for part in parts for name in each} | {"latent.json", "latent.safetensors"}
    assert {
        *wanted([*names, "README.md", "onnx/model.safetensors", "other/config.json"], json.loads)
    } == names


def test_an_adapter_is_fetched_and_needs_the_run_of_its_model(hub, tmp_path):
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    assert {*wanted([*files, "README.md", "optimizer.pt"], json.loads)} == files.keys()
    hub.commit("a/adapter", files)
    done = imported("a/adapter", tmp_path)
    assert done.returncode == 2 and "is an adapter on another model" in done.stderr, done.stderr


def test_an_adapter_of_the_hub_keeps_the_name_of_its_base_model(hub, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert imported(NAME, tmp_path / "a").returncode == 0
    base = tmp_path / "a/run"
    module = "base_model.model.bert.encoder.layer.{}.attention.self.query.lora_{}.weight"
    fields = json.loads((base / "published/config.json").read_text())
    layers, width = fields["num_hidden_layers"], fields["hidden_size"]
    shapes = {"A": (2, width), "B": (width, 2)}
    tensors = {
        module.format(i, end): torch.ones(shape) for i in range(layers) for end, shape in shapes.items()
    }
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    files = {
        "adapter_config.json": json.dumps(described).encode(),
        "adapter_model.safetensors": save(tensors),
    }
    hub.commit("a/adapter", files)
    there = tmp_path / "b"
    done = forked(
        CONVERT, "import", "--input", "a/adapter", "--output", there / "run", "--base", base, cwd=there
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "b/run"
    kept = {name: json.loads((run / f"{name}.json").read_text()) for name in ("source", "adapter_source")}
    assert [each["repository"] for each in kept.values()] == [NAME, "a/adapter"]

    export = ["export", "--checkpoint", run, "--output", tmp_path / "out", "--adapter"]
    assert_refused(forked(CONVERT, *export, "--max-shard-size", "1GB"), "one file of weights")
    done = forked(CONVERT, *export)
    assert done.returncode == 0, done.stderr
    exported = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (exported["base_model_name_or_path"], exported["revision"]) == (NAME, kept["source"]["commit"])


def test_a_directory_of_that_name_goes_first_and_it_is_said(hub, released, tmp_path):
    shutil.copytree(released, tmp_path / NAME)
    (tmp_path / NAME / "pytorch_model.bin").unlink()
    done = imported(NAME, tmp_path)
    assert done.returncode == 0 and f"using the directory {tmp_path / NAME}" in done.stdout
    assert hub.asked == [] and not (tmp_path / "run/source.json").exists()


def refuse_gated(hub, monkeypatch):
    hub.gated.add(NAME)


def refuse_private(hub, monkeypatch):
    hub.private.add(NAME)


def forget(hub, monkeypatch):
    hub.repositories.clear()


def go_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def stop(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (refuse_gated, "accepted its terms"),
        (refuse_private, "none of this name, or shows it only after a login"),
        (forget, "none of this name"),
        (go_offline, "HF_HUB_OFFLINE is set"),
        (stop, "cannot be reached"),
    ],
)
@pytest.mark.parametrize("name", [NAME, "bert-base-uncased"])
def test_what_the_hub_does_not_give_is_one_line_with_the_command(
    change, reason, name, hub, tmp_path, monkeypatch
):
    change(hub, monkeypatch)
    done = imported(name, tmp_path, HF_TOKEN="hf_another" + SECRET)
    assert_refused(done, reason)
    assert (
        f"`hf download {NAME} --local-dir DIR`" in done.stderr
        and f"{CONVERT} import --input DIR" in done.stderr
    )
    assert not (tmp_path / "run").exists()
    assert_no_secret(tmp_path, done)


@pytest.mark.parametrize("wanted_by", ["import", "tokenizer"])
def test_a_process_that_has_imported_nothing_of_the_hub_refuses_in_one_line(wanted_by, tmp_path):
    """A new interpreter: a forked one has what this file has imported."""
    (tmp_path / "text.txt").write_text("a text")
    of = {
        "import": (CONVERT, "import", "--input", NAME, "--output", tmp_path / "run"),
        "tokenizer": (
            "scripts/preprocess_data.py", "--input", tmp_path / "text.txt", "--output", tmp_path / "corpus",
            "--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", NAME,
        ),
    }  # fmt: skip
    done = python(*map(str, of[wanted_by]), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    assert_refused(done, "HF_HUB_OFFLINE is set")
    assert f"hf download {NAME}" in done.stderr


def test_a_wrong_revision_and_a_missing_path_are_one_line(hub, tmp_path):
    assert_refused(imported(f"{NAME}@v9", tmp_path), f"hf download {NAME} --revision v9 --local-dir DIR")
    assert_refused(
        imported("missing", tmp_path), "missing does not exist; pass the directory with the weights"
    )


# Tokenizers


def write_data(tmp_path, **variables):
    (tmp_path / "text.jsonl").write_text(
        json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 9}) + "\n"
    )
    kind = "--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", "a/words", "--workers", 2
    arguments = "--input", tmp_path / "text.jsonl", "--output", tmp_path / "corpus", *kind
    return forked("scripts/preprocess_data.py", *arguments, cwd=tmp_path, **variables)


def train(tmp_path, *settings, **variables):
    given = [
        *(
            "tokenizer.kind=bert_wordpiece",
            "tokenizer.path=a/words",
            "data.sequence_length=32",
            "training.steps=2",
        ),
        *(
            "model.num_layers=1",
            "model.hidden_size=16",
            "model.num_attention_heads=1",
            "batch.global_batch_size=2",
        ),
        *(
            "batch.micro_batch_size=2",
            f"data.train=[{{prefix: {tmp_path / 'corpus'}}}]",
            "run.tensorboard=false",
        ),
        *(
            f"run.directory={tmp_path / 'run'}",
            "training.precision=fp32",
            "schedule.warmup_steps=0",
            "data.validation=[]",
            *settings,
        ),
    ]
    return forked("pretrain_glm.py", "--config", "tiny", *given, cwd=tmp_path, **variables)


@pytest.fixture
def words(hub, tmp_path):
    write_bert(tmp_path / "words", bert_vocab())
    hub.add("a/words", tmp_path / "words")
    shutil.rmtree(tmp_path / "words")
    return hub


def test_a_run_keeps_the_tokenizer_of_one_commit(words, tmp_path, monkeypatch):
    (commit,) = words.repositories["a/words"]
    built = write_data(tmp_path, HF_TOKEN=SECRET)
    assert built.returncode == 0, built.stderr
    first = train(tmp_path, HF_TOKEN=SECRET)
    assert first.returncode == 0, first.stderr
    assert words.downloads() == ["vocab.txt"]  # once, for the workers and the training
    kept = tmp_path / f"run/tokenizer/a--words@{commit}"
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["tokenizer"]["path"] == str(kept)
    assert [path.name for path in kept.iterdir()] == ["vocab.txt"]
    words.commit("a/words", {"vocab.txt": "\n".join([*bert_vocab(), "new"]).encode()})
    shutil.rmtree(tmp_path / "cache")
    asked = len(words.asked)
    again = train(tmp_path, "training.steps=3", HF_TOKEN=SECRET)
    assert again.returncode == 0 and len(words.asked) == asked, again.stderr
    other = train(tmp_path, "training.steps=3", "tokenizer.path=a/words@main")  # names what the branch is now
    assert other.returncode == 2 and "tokenizer" in other.stderr and len(words.asked) > asked
    asked = len(words.asked)
    evaluated = forked(
        CONVERT, "export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", cwd=tmp_path
    )
    assert evaluated.returncode == 0 and len(words.asked) == asked, evaluated.stderr
    assert_no_secret(tmp_path, built, first, again)


def test_a_refused_start_keeps_nothing(words, tmp_path):
    refused = train(tmp_path)  # without a corpus
    assert refused.returncode == 2 and not (tmp_path / "run/tokenizer").exists()


def test_processes_of_a_machine_fetch_once(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context = multiprocessing.get_context("fork")
    section = TokenizerConfig(kind="bert_wordpiece", path="a/words")
    processes = [context.Process(target=load_tokenizer, args=(section,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert words.downloads() == ["vocab.txt"]


def test_a_tokenizer_that_cannot_be_fetched_is_one_line(words, tmp_path, monkeypatch):
    go_offline(words, monkeypatch)
    remedy = "`hf download a/words --local-dir DIR`, where that can be done, and then give tokenizer.path=DIR"
    assert_refused(train(tmp_path), remedy)
    assert_refused(write_data(tmp_path), remedy)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert_refused(train(tmp_path, "tokenizer.kind=hf_json"), "it has no file tokenizer.json")


# Push


def pushed(tmp_path, run, *options, **variables):
    arguments = "export", "--checkpoint", run, "--output", tmp_path / "hf", "--no-verify"
    return forked(CONVERT, *arguments, *options, cwd=tmp_path, **variables)


@pytest.fixture(scope="module")
def run_of_bert(released, tmp_path_factory):
    root = tmp_path_factory.mktemp("pushed")
    done = forked(CONVERT, "import", "--input", released, "--output", root / "run", "--no-verify")
    assert done.returncode == 0, done.stderr
    return root / "run"


def test_an_export_is_pushed_and_comes_in_by_its_name(hub, run_of_bert, tmp_path):
    done = pushed(tmp_path, run_of_bert, "--push-to-hub", "me/mine", "--private", HF_TOKEN=SECRET)
    assert done.returncode == 0, done.stderr
    ((commit, files),) = hub.repositories["me/mine"].items()
    assert f"pushed to me/mine@{commit}" in done.stdout and "me/mine" in hub.private
    written = {
        path.relative_to(tmp_path / "hf").as_posix(): path.read_bytes()
        for path in (tmp_path / "hf").rglob("*")
    }
    assert files == written and "model.safetensors" in files
    again = imported("me/mine", tmp_path, HF_TOKEN=SECRET)
    assert again.returncode == 0, again.stderr
    assert_no_secret(tmp_path, done, again)


@pytest.mark.parametrize(
    ("options", "token", "reason"),
    [
        (["--push-to-hub", "me/mine"], "", "needs a token that may write; log in with `hf auth login`"),
        (["--push-to-hub", "mine"], SECRET, "must be OWNER/NAME"),
        (["--push-to-hub", "me/mine@main"], SECRET, "must be OWNER/NAME"),
        (["--push-to-hub", "me/../mine"], SECRET, "must be OWNER/NAME"),
        (["--private"], SECRET, "--private needs --push-to-hub"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    options, token, reason, hub, run_of_bert, tmp_path
):
    done = pushed(tmp_path, run_of_bert, *options, HF_TOKEN=token)
    assert_refused(done, reason)
    assert hub.asked == [] and not (tmp_path / "hf").exists()
    assert_no_secret(tmp_path, done)


def test_a_push_that_the_hub_refuses_leaves_the_export_and_the_command(hub, run_of_bert, tmp_path):
    done = pushed(tmp_path, run_of_bert, "--push-to-hub", "me/mine", HF_TOKEN="hf_wrong" + SECRET)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert "status 401" in done.stderr and f"`hf upload me/mine {tmp_path / 'hf'}`" in done.stderr
    assert (tmp_path / "hf/model.safetensors").exists()
    assert_no_secret(tmp_path, done)
