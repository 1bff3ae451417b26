"""An exported directory with transformers alone: what its class computes by default, writes, and says of labels.

One process for all directories, which cannot import this project, gets the directories and the texts. What it should
find comes from rows of training: no position, segment, first token or end is handed to the class.
"""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
from safetensors.torch import load_file, save_file
from support.hf.system_runs import CASES, TEXTS, Case, answers, logits_of_inputs, wordpiece, write_run

from data_utils.common.errors import CheckpointError
from megatron_lite.hf.common.verify import compare_outputs
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.published.format import trained_template
from megatron_lite.hf.published.heads import transformers_class_name
from megatron_lite.hf.published.systems import published_system
from megatron_lite.hf.published.verify import class_checks
from megatron_lite.inference.open_run import load_run

# fp32, the same sums in another order; times the largest value beyond 1.
TOLERANCE = 1e-5

USER = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron_lite", "data_utils", "support", "pretrain_glm"):
            raise ImportError("not in this environment: " + name)

sys.meta_path.insert(0, Blocker())
import torch, transformers
from safetensors.torch import save_file

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()

class Banned(transformers.LogitsProcessor):
    def __init__(self, tokens, start):
        self.tokens, self.start = tokens, start
    def __call__(self, ids, scores):
        if ids.shape[1] >= self.start:
            scores[:, self.tokens] = float("-inf")
        return scores

def padded(lists, pad, left=False):
    longest = max(map(len, lists))
    pads = [[None] * (longest - len(x)) for x in lists]
    rows = [[*p, *x] if left else [*x, *p] for x, p in zip(lists, pads)]
    ids = torch.tensor([[pad if token is None else token for token in row] for row in rows])
    return ids, torch.tensor([[int(token is not None) for token in row] for row in rows])

@torch.no_grad()
def used(directory, case, tensors):
    trust = {"trust_remote_code": "blanks" in case}
    model = getattr(transformers, case["auto"]).from_pretrained(directory, dtype=torch.float32, **trust).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **trust)
    config, found = model.config, {"class": type(model).__name__}
    if "blanks" in case:
        fill = transformers.pipeline("blank-infilling", model=directory, max_new_tokens=case["steps"], **trust)
        return found | {"answers": [fill(text)["span_ids"] for text in case["blanks"]]}
    found["calls"] = []
    for number, text in enumerate(case["texts"]):
        inputs = tokenizer(*text, return_tensors="pt")
        found["calls"].append({name: tensor[0].tolist() for name, tensor in inputs.items()})
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([[config.decoder_start_token_id]])
        out = model(**inputs)
        tensors[f"call_{number}"] = (out.logits if "logits" in out else out.prediction_logits)[0].contiguous()
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    if "inputs" in case:
        ids, mask = padded(case["inputs"], pad)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if config.is_encoder_decoder:
            labels, real = padded(case["labels"], -100)
            out = model(**inputs, labels=labels)
            logits = out.logits[real.bool()]
        elif "labels" in case:
            out = model(**inputs, labels=ids.masked_fill(mask == 0, -100))
            logits = out.logits[mask.bool()]
        else:
            out = model(**inputs)
            logits = out.logits[mask.bool()]
        tensors["logits"] = logits.contiguous()
        if "labels" in case:
            found["loss"] = out.loss.item()
    if "text" in case:
        fill = transformers.pipeline("fill-mask", model=directory)
        found["best"] = fill(case["text"], top_k=1)[0]["token"]
    if "prompts" in case:
        written = []
        # OpenAI's class counts padding as positions, XLNet's reads it.
        together = config.model_type not in ("openai-gpt", "xlnet")
        for prompts in [case["prompts"]] if together else [[prompt] for prompt in case["prompts"]]:
            ids, mask = padded(prompts, pad, left=not config.is_encoder_decoder)
            start = 1 + case["unseen"] if config.is_encoder_decoder else ids.shape[1]
            count = case["steps"] + case["unseen"]
            processors = [Banned(case["banned"], start)]
            rows = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False,
                                  logits_processor=processors)[:, start:].tolist()
            written += rows
        ends = model.generation_config.eos_token_id
        found["ends"] = ends = sorted(ends if isinstance(ends, list) else [] if ends is None else [ends])
        found["answers"] = [[t for i, t in enumerate(row) if not set(row[: i + 1]) & set(ends)] for row in written]
    return found

root = sys.argv[1]
cases, found, tensors = json.load(open(root + "/cases.json")), {}, {}
for name, case in cases.items():
    of_case = {}
    try:
        found[name] = used(root + "/" + case["directory"], case, of_case)
    except Exception as error:
        found[name] = {"error": repr(error)[:600]}
    tensors |= {name + "/" + key: tensor for key, tensor in of_case.items()}
save_file(tensors, root + "/found.safetensors")
json.dump(found, open(root + "/found.json", "w"))
"""


def use(root, references):
    """What a user of the directories finds. Args: references: of each case, with its directory below the root."""
    (root / "cases.json").write_text(json.dumps(references))
    done = subprocess.run(
        [sys.executable, "-I", "-c", USER, str(root)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((root / "found.json").read_text()), load_file(root / "found.safetensors")


def edit(directory, **changes):
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def move_positions(directory):
    path, name = directory / "model.safetensors", "roberta.embeddings.position_embeddings.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].roll(1, dims=0)}, path, {"format": "pt"})


# Mistakes of an export, each with the case that it is made in.
PLANTED = {
    "another padding token": ("roberta, pad 3", lambda path: edit(path, pad_token_id=0)),
    "another first position": ("roberta, pad 1", move_positions),
    "another first token": ("t5", lambda path: edit(path, decoder_start_token_id=7)),
    "another first token of BART": ("bart", lambda path: edit(path, decoder_start_token_id=7)),
    "no first token": ("t5, glm", lambda path: edit(path, decoder_start_token_id=None)),
}


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """The directories, runs, and case or planted mistake -> what was expected and found, with the logits of both."""
    root = tmp_path_factory.mktemp("alone")
    references, expected, runs = {}, {}, {}
    for number, (name, case) in enumerate(CASES.items()):
        runs[name] = run = write_run(case, root / f"{number}")
        references[name], expected[name] = answers(case, run)
        references[name]["texts"] = texts_of(case)
        references[name]["directory"] = f"{number}/export"
        export_run(root / f"{number}/run", root / f"{number}/export", ExportOptions(verify=False))
    for number, (name, (case, plant)) in enumerate(PLANTED.items()):
        shutil.copytree(root / references[case]["directory"], root / f"planted_{number}")
        plant(root / f"planted_{number}")
        references[name] = references[case] | {"directory": f"planted_{number}"}
        expected[name] = expected[case]
    results, tensors = use(root, references)
    found = {
        name: (reference, results[name], expected[name], tensors.get(f"{name}/logits"))
        for name, reference in references.items()
    }
    return root, found, runs, tensors


def texts_of(case):
    """Texts for the tokenizer, and two together where a model reads pairs."""
    return [[text] for text in TEXTS] + ([TEXTS[:2]] if case.auto == "AutoModelForMaskedLM" else [])


def require_right(reference, result, expected, logits):
    assert "error" not in result, result["error"]
    if expected is not None:
        assert (logits - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max())
    if "loss" in reference:
        assert result["loss"] == pytest.approx(reference["loss"], rel=TOLERANCE)
    for name in ("answers", "best"):
        if name in reference:
            assert result[name] == reference[name]


@pytest.mark.parametrize("name", CASES)
def test_a_directory_alone_computes_what_was_trained(found, name):
    require_right(*found[1][name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.system != "glm"])
def test_what_the_tokenizer_gives_is_what_the_class_takes(found, name):
    """`model(**tokenizer(text))`: the ids, and the segments where training had such."""
    _, cases, runs, tensors = found
    run, (_, result, _, _) = runs[name], cases[name]
    assert "error" not in result, result["error"]
    config = json.loads((found[0] / cases[name][0]["directory"] / "config.json").read_text())
    for number, inputs in enumerate(result["calls"]):
        segments = inputs.get("token_type_ids")
        texts = [run.tokenizer.encode(text) for text in cases[name][0]["texts"][number]]
        assert sum(map(len, texts)) <= len(inputs["input_ids"]) <= sum(map(len, texts)) + 4
        if CASES[name].system == "xlnet":
            assert segments == [0] * (len(segments) - 1) + [2]
        elif run.config.model.segments > 1:
            assert max(segments) == len(texts) - 1
        else:
            assert segments is None or set(segments) == {0}
        start = config["decoder_start_token_id"] if config.get("is_encoder_decoder") else None
        expected = logits_of_inputs(run, inputs["input_ids"], segments, start)
        difference = (tensors[f"{name}/call_{number}"] - expected).abs().max()
        assert difference <= TOLERANCE * max(1.0, expected.abs().max())


def test_a_system_without_a_class_is_refused(tmp_path):
    case = Case("unilmv2", wordpiece, "unilmv2")
    write_run(case, tmp_path / "made")
    with pytest.raises(CheckpointError, match="of a model with options that GLM's"):
        export_run(tmp_path / "made/run", tmp_path / "export", ExportOptions(verify=False))
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_of_an_export_is_noticed_alone_and_by_the_export(found, name):
    root, cases, *_ = found
    with pytest.raises(AssertionError):
        require_right(*cases[name])
    reference, case = cases[name][0], PLANTED[name][0]
    run = load_run((root / cases[case][0]["directory"]).with_name("run"))
    layout = trained_template(run)
    start = None if layout is None else layout.start[0]
    class_name = transformers_class_name(published_system(run.config.model), run.config.model)
    with pytest.raises((CheckpointError, ValueError), match=r"does not compute|decoder_start_token_id"):
        directory, config = root / reference["directory"], run.config.model
        compare_outputs(
            partial(class_checks, directory, class_name, config, start=start),
            lambda: run.model,
            1e-4,
            "the export",
            run.checkpoint.shapes,
        )


def test_unknown_words_are_no_padding(found):
    """GPT's vocabulary has no padding, for which another id stands."""
    root, cases, *_ = found
    described = json.loads((root / cases["gpt"][0]["directory"] / "config.json").read_text())
    assert described["pad_token_id"] is described["eos_token_id"] is None
