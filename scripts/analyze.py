#!/usr/bin/env python3
"""Look inside a run: how contextual its words are, which heads it needs, what they look at. See docs/analysis.md.

    python scripts/analyze.py contextuality --checkpoint RUN --input texts.txt --plot layers.png
    python scripts/analyze.py heads --checkpoint RUN --task configs/tasks/rte.yaml --prune 0.5 --output runs/pruned

Commands:
    contextuality   how alike the vectors of a word are in its contexts, layer by layer
    heads           the importance of each head of attention, the score without it, a run without the least important
    attention       the weights of attention of a few texts, drawn for each head, and what heads look at
    features        the vectors of all words in all layers, as arrays
    probe           how well a linear classifier of each layer knows the texts' labels
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# isort: split
from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, run_command
from data_utils.common.files import (
    require_named,
    require_new_directory,
    require_writable,
    write_whole,
)
from data_utils.common.progress import progress_bar
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import check, merge, parse_override
from megatron_lite.checkpoint.resolve_path import resolve_model
from megatron_lite.models.optimus.inputs import read_lines, require_labels

if TYPE_CHECKING:  # they import torch
    import torch

    from megatron_lite.analysis.heads import Head
    from megatron_lite.analysis.words import Text
    from megatron_lite.inference.open_run import Run

Add = Callable[..., Any]


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add_own, _) in COMMANDS.items():
        command = commands.add_parser(name)
        add = command.add_argument
        text = "run (latest checkpoint), or a step_... directory"
        add("--checkpoint", required=True, type=Path, help=text)
        add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
        add("--batch", type=int, default=16, help="batch size of a forward pass (default 16)")
        add("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
        add("--plot", type=Path, metavar="FILE", help="plot them (PNG, SVG or PDF)")
        add_own(add)
    return parser.parse_args(given)


def add_texts(add: Add) -> None:
    add("--input", required=True, type=Path, help="file with one text per line")


def options_of_contextuality(add: Add) -> None:
    add_texts(add)
    add(
        "--min-contexts",
        type=int,
        default=5,
        metavar="N",
        help="minimum number of texts that contain a word (default 5)",
    )
    text = "random words for the baselines, one per text (default 1000)"
    add("--samples", type=int, default=1000, metavar="N", help=text)
    add("--centred", action="store_true", help="subtract the mean before computing the explained variance")
    add("--seed", type=int, default=0, help="seed of the random words (default 0)")


def options_of_heads(add: Add) -> None:
    text = "task YAML whose metric scores the heads; default: the run's task, or else its validation loss"
    add("--task", type=expanded_path, metavar="FILE", help=text)
    add(
        "--samples",
        type=int,
        default=1000,
        metavar="N",
        help="maximum number of samples per file (default 1000)",
    )
    text = "granularity of the head gates: per example or per token (default example)"
    add("--per", choices=("example", "token"), default="example", help=text)
    text = "also report the score without each head, and with each as the only head of its layer"
    add("--ablate", action="store_true", help=text)
    text = "greedily remove K heads, each time the one that costs least"
    add("--greedy", type=int, default=0, metavar="K", help=text)
    text = "remove this share of all heads, least important first"
    add("--prune", type=float, metavar="SHARE", help=text)
    text = "with --prune: remove a tenth of all heads at a time and recompute the importance"
    add("--again", action="store_true", help=text)
    text = "with --prune: minimum number of heads per layer (default 1)"
    add("--keep", type=int, default=1, metavar="N", help=text)
    text = "with --prune: compare raw importance across layers instead of normalizing per layer"
    add("--raw", action="store_true", help=text)
    text = "with --prune: new run directory for the pruned checkpoint"
    add("--output", type=Path, metavar="RUN", help=text)
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the task file")


def options_of_attention(add: Add) -> None:
    add_texts(add)
    add(
        "--count",
        type=int,
        default=4,
        metavar="N",
        help="number of texts (default 4); the first one is plotted",
    )


def options_of_features(add: Add) -> None:
    add_texts(add)
    text = "NumPy file (.npz) to write: vectors [words, layers + 1, hidden size], words, and the text of each"
    add("--output", required=True, type=Path, help=text)


def options_of_probe(add: Add) -> None:
    add_texts(add)
    add("--labels", required=True, type=Path, help="file with one label per line, for the same texts")
    add("--trials", type=int, default=5, help="random train/test splits (default 5)")
    add("--seed", type=int, default=0, help="seed of the splits (default 0)")


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(given)
    require_sense(arguments)
    _, run_it = COMMANDS[arguments.command]
    run_it(arguments)


def require_sense(arguments: argparse.Namespace) -> None:
    """Raise ConfigError or DataError for arguments that do not go together."""
    options = vars(arguments)
    for option, least in (("batch", 1), ("samples", 2), ("min_contexts", 2), ("count", 1), ("trials", 1), ("greedy", 0),
                          ("keep", 0)):  # fmt: skip
        value = options.get(option, least)
        check(value >= least, f"--{option.replace('_', '-')} is {value}; it must be at least {least}.")
    share = options.get("prune")
    if arguments.command == "heads":
        check(share is None or 0 < share < 1, f"--prune is {share}; it must be between 0 and 1.")
        for option, is_given in (
            ("--output", arguments.output),
            ("--again", arguments.again),
            ("--raw", arguments.raw),
        ):
            check(share is not None or not is_given, f"{option} needs --prune; pass --prune SHARE too.")
        if arguments.output is not None:
            require_new_directory(arguments.output)
    elif arguments.command == "features":
        require_named(arguments.output, "--output", (".npz",))
        check(arguments.plot is None, "features are arrays and cannot be plotted; remove --plot.")
    if arguments.json is not None:
        require_writable(arguments.json, "--json")
    if arguments.plot is not None:
        require_named(arguments.plot, "--plot")
    resolve_model(arguments.checkpoint, "--checkpoint")


def opened(arguments: argparse.Namespace, least: int = 1) -> tuple[Run, list[Text]]:
    """The run and the texts of --input as it reads them, `least` of which have a word."""
    lines = read_lines(arguments.input, "--input", "text")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.analysis.words import make_inputs, read, require_words
    from megatron_lite.inference.open_run import open_run

    closed = open_run(arguments.checkpoint, arguments.tokenizer)
    closed.require_one_transformer()
    texts = read(lines, make_inputs(closed))
    require_words(texts, least, arguments.input)
    cut = sum(text.cut for text in texts)
    if cut:
        print(f"{cut} words beyond the sequence length are skipped")
    return closed.with_model(), texts


def vectors_of(arguments: argparse.Namespace, run: Run, texts: Sequence[Text]) -> list[torch.Tensor]:
    """The words of each text in all layers: [words, layers + 1, D]."""
    from megatron_lite.analysis.words import batches, word_vectors

    found: list[torch.Tensor] = []
    with progress_bar(total=len(texts), unit="text") as bar:
        for batch in batches(texts, arguments.batch):
            found += word_vectors(run, batch)
            bar.update(len(batch))
    return found


def contextuality(arguments: argparse.Namespace) -> None:
    run, texts = opened(arguments, 2)
    from megatron_lite.analysis.contextuality import measure
    from megatron_lite.analysis.tables import contextuality_table

    texts = [text for text in texts if text.words]
    vectors = vectors_of(arguments, run, texts)
    found = measure(
        [text.words for text in texts],
        vectors,
        least=arguments.min_contexts,
        samples=arguments.samples,
        centred=arguments.centred,
        seed=arguments.seed,
    )
    if found is None:
        raise ConfigError(
            f"no word of {arguments.input} occurs in {arguments.min_contexts} texts; use more texts, or lower "
            "--min-contexts."
        )
    measured = {name: values.tolist() for name, values in found.measured.items()}
    baseline = {name: values.tolist() for name, values in found.baseline.items()}
    print(f"{len(texts)} texts, {len(found.contexts)} words in at least {arguments.min_contexts} of them")
    print(contextuality_table(found))
    words = {
        word: {"contexts": found.contexts[word], "self_similarity_adjusted": values.tolist()}
        for word, values in found.by_word.items()
    }
    write_json(arguments, {"texts": len(texts), "measured": measured, "baseline": baseline, "words": words})
    if arguments.plot is not None:
        from megatron_lite.analysis.plots import lines

        lines(arguments.plot, measured, "cosine similarity, or explained variance", baseline)


def heads(arguments: argparse.Namespace) -> None:
    tree: dict[str, Any] = {} if arguments.task is None else load_yaml(arguments.task)
    if arguments.task is not None and "task" not in tree:
        raise ConfigError(
            f"--task {arguments.task} has no section task; use a file like those in configs/tasks/."
        )
    for override in arguments.overrides:
        tree = merge(tree, parse_override(override))
    from megatron_lite.analysis import heads as measures
    from megatron_lite.analysis.head_scores import make_head_scorer, write_pruned
    from megatron_lite.analysis.tables import by_group, head_table
    from megatron_lite.inference.open_run import open_run

    closed = open_run(arguments.checkpoint, arguments.tokenizer)
    closed.require_one_transformer()
    scorer, run = make_head_scorer(closed, tree, arguments.checkpoint, arguments.samples, arguments.batch)
    model, per_token = run.model, arguments.per == "token"
    every = measures.all_heads(model)
    check(
        arguments.greedy < len(every),
        f"--greedy is {arguments.greedy}, but the model has {len(every)} heads; lower it.",
    )
    sizes = measures.importance(model, scorer.examples(), per_token=per_token)
    whole = scorer.score()
    result: dict[str, Any] = {
        "measure": scorer.measure,
        "score": whole,
        "per": arguments.per,
        "importance": {name: values.tolist() for name, values in sizes.items()},
    }
    print(f"{scorer.measure}: {whole:.4f} with all {len(every)} heads")
    print(head_table(f"importance, nats per {arguments.per}", result["importance"], "9.2e"))
    if arguments.ablate:
        result["without"] = by_group(measures.ablated(model, scorer.score, every))
        result["alone"] = by_group(measures.alone(model, scorer.score, every))
        print(head_table("score without each head", result["without"], "9.4f"))
        print(head_table("score with each head as the only one of its layer", result["alone"], "9.4f"))
    if arguments.greedy:
        found = measures.greedy(model, scorer.score, arguments.greedy)
        result["greedy"] = [{"group": h.group, "head": h.number, "score": score} for h, score in found]
        for head, score in found:
            print(f"{score:.4f} after also removing {head.group} head {head.number}")
    removed: list[Head] = []
    if arguments.prune is not None:
        count = round(arguments.prune * len(every))
        step = math.ceil(len(every) / 10) if arguments.again else count
        measure = lambda: measures.importance(model, scorer.examples(), per_token=per_token)  # noqa: E731
        removed = measures.prune(model, sizes, count, step, measure, keep=arguments.keep, raw=arguments.raw)
        result["removed"], result["pruned_score"] = [list(head) for head in removed], scorer.score()
        print(f"{result['pruned_score']:.4f} without {len(removed)} of {len(every)} heads: "
              + ", ".join(f"{head.group} head {head.number}" for head in removed))  # fmt: skip
        if arguments.output is not None:
            path = write_pruned(run, removed, arguments.output)
            print(f"{path} has zeros for these heads, so a step is not faster; it has no optimizer state")
    write_json(arguments, result)
    if arguments.plot is not None:
        from megatron_lite.analysis.plots import head_picture

        crossed = {name: [head.number for head in removed if head.group == name] for name in sizes}
        head_picture(arguments.plot, result["importance"], crossed, f"importance, nats per {arguments.per}")


def attention(arguments: argparse.Namespace) -> None:
    run, texts = opened(arguments)
    from megatron_lite.analysis.attention_maps import (
        attention_statistics,
        mean_attention_statistics,
        text_weights,
    )
    from megatron_lite.analysis.tables import attention_table

    shown = [text for text in texts if text.words][: arguments.count]
    weights = [text_weights(run, text) for text in shown]
    found = []
    for text, each in zip(shown, weights, strict=True):
        rows = text.sample.target_groups[0].positions
        found.append(attention_statistics(each, int(rows[0]), each.shape[-1] - 1 - int(rows[-1])))
    means = {name: values.tolist() for name, values in mean_attention_statistics(found).items()}
    print(
        f"means over {len(shown)} texts; entropy in nats, distance in tokens, shares of the attention weight"
    )
    print(attention_table(means))
    write_json(arguments, {"texts": len(shown), "means": means})
    if arguments.plot is not None:
        from megatron_lite.analysis.plots import maps

        ids = shown[0].sample.documents[0].tokens
        maps(
            arguments.plot,
            weights[0],
            [run.tokenizer.decode([token]) or f"<{token}>" for token in ids.tolist()],
        )


def features(arguments: argparse.Namespace) -> None:
    run, texts = opened(arguments)
    import numpy as np
    import torch

    vectors = torch.cat(vectors_of(arguments, run, [text for text in texts if text.words]))
    words = [word for text in texts for word in text.words]
    owner = np.repeat(np.arange(len(texts)), [len(text.words) for text in texts])
    content = io.BytesIO()
    np.savez(content, vectors=vectors.numpy(), words=np.array(words, np.str_), text=owner)
    write_whole(arguments.output, content.getvalue(), "--output")
    print(
        f"{arguments.output}: {len(words)} words, {vectors.shape[1]} layers, hidden size {vectors.shape[2]}"
    )
    write_json(arguments, {"words": len(words), "layers": vectors.shape[1], "hidden_size": vectors.shape[2]})


def probe(arguments: argparse.Namespace) -> None:
    labels = read_lines(arguments.labels, "--labels", "label")
    require_labels(
        labels, len(read_lines(arguments.input, "--input", "text")), [], f"--labels {arguments.labels}"
    )
    run, texts = opened(arguments, len(labels))
    from statistics import mean, pstdev

    import torch

    from megatron_lite.models.optimus.probe import accuracies, largest_class

    # [layers + 1, texts, D]
    means = torch.stack([each.mean(0) for each in vectors_of(arguments, run, texts)], dim=1)
    found = [accuracies(layer, labels, trials=arguments.trials, seed=arguments.seed) for layer in means]
    for number, each in enumerate(found):
        print(f"layer {number:3}  accuracy {mean(each):.4f} +- {pstdev(each):.4f}")
    largest = largest_class(labels)
    print(f"majority class: {largest:.4f}")
    write_json(arguments, {"texts": len(labels), "accuracies": found, "largest_class": largest})
    if arguments.plot is not None:
        from megatron_lite.analysis.plots import lines

        curve = {"mean of a text's word vectors": [mean(each) for each in found]}
        lines(arguments.plot, curve, "accuracy of a linear classifier", {})


def write_json(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if arguments.json is not None:
        content = {"command": arguments.command, "checkpoint": str(arguments.checkpoint), **result}
        write_whole(
            arguments.json, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(), "--json"
        )


COMMANDS: dict[str, tuple[Callable[[Add], None], Callable[[argparse.Namespace], None]]] = {
    "contextuality": (options_of_contextuality, contextuality),
    "heads": (options_of_heads, heads),
    "attention": (options_of_attention, attention),
    "features": (options_of_features, features),
    "probe": (options_of_probe, probe),
}


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
