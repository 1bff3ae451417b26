"""Uses what the changes of docs/changes.md add, in a copy of the project: `use_changes.py COPY SETTINGS`.

SETTINGS is the JSON of a very small run. The last line of stdout is JSON: the name of each change -> what it did.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def train(settings: dict) -> dict:
    """A run with the new norm and optimizer."""
    from megatron_lite.config.sections import ParallelConfig
    from megatron_lite.parallel.context import initialize
    from megatron_lite.parallel.launch import Launch
    from support.training.training import make_trainer

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    context = initialize(Launch.from_environment(), ParallelConfig(), timeout_seconds=60)
    settings["model"] |= {"dynamic_tanh": True}
    settings["optimizer"] |= {"kind": "lion"}
    settings["training"] |= {"steps": 4}
    trainer = make_trainer(context, settings)
    trainer.fit()
    lines = (Path(settings["run"]["directory"]) / "metrics.jsonl").read_text().splitlines()
    return {
        "parameters": sorted(trainer.engine.named_parameters),
        "records": [record for record in map(json.loads, lines) if record["kind"] == "train"],
        "kinds": sorted(next(iter(trainer.engine.fragments())).tensors),
    }


def lion() -> dict:
    """Two steps and the same by the paper, the memory of the dry run, and a setting that is not read."""
    import torch
    from torch import nn

    from data_utils.common.errors import ConfigError
    from data_utils.common.settings import build
    from megatron_lite.config.sections import OptimizerConfig
    from megatron_lite.estimate.average_sequence import average_sequence
    from megatron_lite.estimate.gpus import GPUS
    from megatron_lite.estimate.step_estimate import estimate
    from support.step_profiles import PAPER, config_of
    from support.transformer.optimizers import Ours

    settings = {"kind": "lion", "beta2": 0.99, "weight_decay": 0.1}
    torch.manual_seed(0)
    weights, *gradients = torch.randn(3, 4, 6).unbind()
    name, lr = "layers.0.dense.weight", 0.01
    ours = Ours({name: nn.Parameter(weights.clone())}, build(OptimizerConfig, settings))
    momentum = torch.zeros_like(weights)
    for gradient in gradients:
        ours.step({name: gradient}, lr)
        weights -= lr * ((0.9 * momentum + 0.1 * gradient).sign() + 0.1 * weights)
        momentum = 0.99 * momentum + 0.01 * gradient
    before = ours.state()
    ours.step({name: gradients[0] * float("inf")}, lr, found_inf=1.0)
    try:
        error = str(build(OptimizerConfig, settings | {"eps": 0.01}))
    except ConfigError as refusal:
        error = str(refusal)
    config = config_of(PAPER, 1, 1, ("optimizer.kind=lion",))
    found = estimate(config, 1, GPUS["h100"], average_sequence(config))
    return {
        "ours": ours.weights()[name].flatten().tolist(),
        "paper's": weights.flatten().tolist(),
        "unchanged by infinite gradients": all(map(torch.equal, before, ours.state())),
        "bytes": found.peak.optimizer / found.rank_parameters,
        "error": error,
    }


def published_system(directory: Path) -> dict:
    """A random model of transformers' class, imported with its proof and exported again."""
    import torch
    from transformers import Data2VecTextConfig, Data2VecTextForMaskedLM

    from megatron_lite.hf.export import ExportOptions, export_run
    from megatron_lite.hf.importing import import_directory

    (directory / "vocab.txt").write_text("\n".join(["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *"abcdef"]))
    tree = {"tokenizer": {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt")}}
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    more = {"vocab_size": 20, "max_position_embeddings": 42, "type_vocab_size": 1}
    model = Data2VecTextForMaskedLM(Data2VecTextConfig(**sizes, **more))
    model.save_pretrained(directory / "theirs")
    proof = import_directory(directory / "theirs", directory / "ours", tree)
    export_run(directory / "ours", directory / "back", ExportOptions())
    again = Data2VecTextForMaskedLM.from_pretrained(directory / "back")
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    return {"proof": str(proof), "equal": all(torch.equal(*pair) for pair in pairs)}


def main() -> None:
    copy, settings = sys.argv[1:]
    sys.path[:1] = [copy, str(TESTS)]
    found = {"training": train(json.loads(settings)), "optimizer": lion()}
    with tempfile.TemporaryDirectory() as directory:
        found["published system"] = published_system(Path(directory))
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
