#!/usr/bin/env python3
"""Measure the latent space of a run of OPTIMUS, and use it. See docs/latent.md.

    python scripts/latent.py evaluate --checkpoint RUN --input sentences.txt --json numbers.json
    python scripts/latent.py interpolate --checkpoint RUN --text 'a girl sleeps' --text 'two men play football'

Commands:
    evaluate      bounds of the likelihood, perplexity, mutual information, active units
    encode        mean and log variance of each sentence's latent vector, as arrays
    reconstruct   each sentence, written from its own latent vector
    interpolate   texts on the way from one sentence to another
    analogy       what is to the third sentence as the second is to the first
    sample        texts of latent vectors that are drawn from the prior
    probe         how well a linear classifier of latent vectors knows the sentences' labels
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import PICTURES, require_named, require_writable, write_whole
from data_utils.common.settings import check
from megatron_lite.checkpoint.resolve_path import resolve_model
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.models.optimus.inputs import Sampling, read_lines, require_labels

if TYPE_CHECKING:  # they import torch
    import torch

    from megatron_lite.models.optimus.interface import LatentModel, Sentence

TEXTS = "a sentence; repeatable"
WRITING = (
    "--strategy", "--max-length", "--min-length", "--temperature", "--top-k", "--top-p", "--num-beams",
    "--length-penalty",
)  # fmt: skip
# Exact numbers of --text: what each is.
COUNTS = {"interpolate": (2, "the two end points"), "analogy": (3, "A, B and C")}


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add_own in OPTIONS.items():
        command = commands.add_parser(name)
        add = command.add_argument
        text = "run (latest checkpoint), or a step_... directory"
        add("--checkpoint", required=True, type=Path, help=text)
        add("--tokenizer", type=Path, help="encoder tokenizer, if it moved since training")
        add(
            "--decoder-tokenizer",
            type=Path,
            help="decoder tokenizer, if the decoder has its own and it moved",
        )
        add("--batch", type=int, default=16, help="batch size of a forward pass (default 16)")
        add("--seed", type=int, default=0, help="random seed (default 0)")
        add_own(add)
    return parser.parse_args(given)


def add_picture(add: Callable[..., Any]) -> None:
    add("--picture", type=Path, metavar="FILE", help="plot the latent space (PNG, SVG or PDF)")
    text = "with --picture: two latent components instead of the principal components"
    add("--axes", type=int, nargs=2, metavar="I", help=text)


def add_writing(add: Callable[..., Any]) -> None:
    add("--json", type=Path, metavar="FILE", help="write the texts to this file too")
    settings = {f"--{field.name.replace('_', '-')}": field for field in fields(GenerationConfig)}
    for option in WRITING:
        field = settings[option]
        kind = {"str": str, "int": int, "float": float}[str(field.type)]
        meaning = field.metadata["help"].replace("per blank", "of a text")
        add(option, type=kind, default=field.default, help=f"{meaning} (default: {field.default})")


def options_of_evaluate(add: Callable[..., Any]) -> None:
    add("--input", required=True, type=Path, help="file with one sentence per line")
    add("--samples", type=int, default=100, metavar="K", help="latent samples per sentence (default 100)")
    add("--chunk", type=int, default=5, help="latent samples per forward pass (default 5)")
    add("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
    add_picture(add)


def options_of_encode(add: Callable[..., Any]) -> None:
    add("--input", required=True, type=Path, help="file with one sentence per line")
    text = "NumPy file (.npz) to write: mu and logvar, one row per sentence"
    add("--output", required=True, type=Path, help=text)
    add_picture(add)


def options_of_reconstruct(add: Callable[..., Any]) -> None:
    add("--text", action="append", default=[], help=TEXTS)
    add("--input", type=Path, help="file with one sentence per line")
    add_writing(add)


def options_of_interpolate(add: Callable[..., Any]) -> None:
    add("--text", action="append", default=[], help="one of the two end points; pass it twice")
    add("--points", type=int, default=11, help="number of texts, both end points included (default 11)")
    add_writing(add)


def options_of_analogy(add: Callable[..., Any]) -> None:
    add("--text", action="append", default=[], help="A, B and C; pass it three times")
    add("--scale", type=float, default=1.0, help="step from C along B - A (default 1)")
    add_writing(add)


def options_of_sample(add: Callable[..., Any]) -> None:
    add("--count", type=int, default=10, help="texts (default 10)")
    add_writing(add)


def options_of_probe(add: Callable[..., Any]) -> None:
    add("--input", required=True, type=Path, help="file with one sentence per line")
    add("--labels", required=True, type=Path, help="file with one label per line, for the same sentences")
    add(
        "--labels-per-class",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="training sentences per class (default: 80 %% of them); several numbers give a line each",
    )
    add("--trials", type=int, default=5, help="random train/test splits (default 5)")
    add("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
    add_picture(add)


OPTIONS = {
    "evaluate": options_of_evaluate,
    "encode": options_of_encode,
    "reconstruct": options_of_reconstruct,
    "interpolate": options_of_interpolate,
    "analogy": options_of_analogy,
    "sample": options_of_sample,
    "probe": options_of_probe,
}


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(given)
    require_sense(arguments)
    texts = given_texts(arguments)
    labels = None
    if arguments.command == "probe":
        labels = read_lines(arguments.labels, "--labels", "label")
        require_labels(labels, len(texts), arguments.labels_per_class, f"--labels {arguments.labels}")
    resolve_model(arguments.checkpoint, "--checkpoint")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.models.optimus.open_run import open_latent

    model = open_latent(arguments.checkpoint, arguments.tokenizer, arguments.decoder_tokenizer)
    sentences = model.read(texts)
    if arguments.command == "evaluate":
        evaluate(arguments, model, sentences)
    elif arguments.command == "encode":
        encode(arguments, model, sentences)
    elif arguments.command == "probe":
        assert labels is not None
        probe(arguments, model, sentences, labels)
    else:
        write(arguments, model, sentences)


def require_sense(arguments: argparse.Namespace) -> None:
    """Raise ConfigError or DataError for arguments that do not go together."""
    options = vars(arguments)
    numbers = {"samples", "chunk", "batch", "seed"} & options.keys()
    Sampling(**{name: options[name] for name in numbers})
    if "strategy" in options:
        generation(arguments)
    for option, least in (("points", 2), ("count", 1), ("trials", 1)):
        value = options.get(option, least)
        check(value >= least, f"--{option} is {value}; it must be at least {least}.")
    for value in options.get("labels_per_class", []):
        check(value >= 1, f"--labels-per-class is {value}; it must be at least 1.")
    check(
        math.isfinite(options.get("scale", 0.0)),
        f"--scale is {options.get('scale')}; it must be a finite number.",
    )
    if options.get("json") is not None:
        require_writable(options["json"], "--json")
    for option, suffixes in (("picture", PICTURES), ("output", (".npz",))):
        if options.get(option) is not None:
            require_named(options[option], f"--{option}", suffixes)
    require_axes(options.get("axes"), arguments)


def require_axes(axes: Sequence[int] | None, arguments: argparse.Namespace) -> None:
    if axes is None:
        return
    check(arguments.picture is not None, "--axes needs --picture; pass --picture FILE too.")
    check(
        min(axes) >= 0 and axes[0] != axes[1],
        f"--axes is {axes[0]} {axes[1]}; it must be two different components, counted from 0.",
    )


def given_texts(arguments: argparse.Namespace) -> list[str]:
    """The sentences. Raise ConfigError or DataError where there are too few of them."""
    command, texts = arguments.command, [text.strip() for text in getattr(arguments, "text", [])]
    if command in COUNTS:
        count, meaning = COUNTS[command]
        check(
            len(texts) == count,
            f"{command} takes {count} texts ({meaning}), but {len(texts)} are given; pass --text {count} "
            "times.",
        )
    if getattr(arguments, "input", None) is not None:
        texts += read_lines(arguments.input, "--input", "sentence")
    check(command == "sample" or bool(texts), "no text given; pass --text 'a sentence' or --input FILE.")
    check("" not in texts, "a --text is empty; it must be a sentence.")
    if command == "evaluate" or getattr(arguments, "picture", None) is not None:
        what = "mutual information and active units need" if command == "evaluate" else "a picture needs"
        check(len(texts) >= 2, f"--input {arguments.input} has 1 sentence, but {what} at least 2; add lines.")
    return texts


def generation(arguments: argparse.Namespace) -> GenerationConfig:
    names = [option[2:].replace("-", "_") for option in WRITING]
    seed = {"seed": arguments.seed} if arguments.strategy == "sample" else {}
    return GenerationConfig(**{name: getattr(arguments, name) for name in names}, **seed)


def evaluate(arguments: argparse.Namespace, model: LatentModel, sentences: Sequence[Sentence]) -> None:
    from megatron_lite.models.optimus.bounds import measure, summarize

    require_components(arguments, model)
    sampling = Sampling(
        samples=arguments.samples, chunk=arguments.chunk, batch=arguments.batch, seed=arguments.seed
    )
    measured = measure(model, sentences, sampling)
    found = {"checkpoint": str(arguments.checkpoint), "samples": sampling.samples, **summarize(measured)}
    print(table(found))
    if arguments.json is not None:
        write_json(arguments.json, found)
    if arguments.picture is not None:
        draw_picture(arguments, measured.mu, measured.divergence, None)


def table(found: dict[str, Any]) -> str:
    """A table of the numbers of an evaluation, for a terminal."""
    active, size = found["active_units"], len(found["divergence_by_component"])
    most = f"at most {math.log(found['sentences']):.2f}, the logarithm of the number of sentences"
    rows = [
        ("perplexity", found["perplexity"], f"over {found['tokens']} predicted tokens"),
        ("perplexity, BOS included", found["perplexity_with_bos"], "as in published results"),
        (
            f"bound L_{found['samples']}",
            found["bound"],
            "nats per sentence, lower bound of the log-likelihood",
        ),
        ("-ELBO", found["negative_elbo"], "reconstruction + divergence"),
        ("reconstruction", found["reconstruction"], "nats per sentence"),
        ("divergence (KL)", found["divergence"], "without free bits"),
        ("mutual information", found["mutual_information"], most),
    ]
    lines = [f"{name:24}{value:12.4f}  {meaning}" for name, value, meaning in rows]
    return "\n".join([f"{found['sentences']} sentences", *lines, f"{'active units':24}{active:7} of {size}"])


def encode(arguments: argparse.Namespace, model: LatentModel, sentences: Sequence[Sentence]) -> None:
    import numpy as np

    mu, logvar = posteriors_of(arguments, model, sentences)
    content = io.BytesIO()
    np.savez(content, mu=mu.float().numpy(), logvar=logvar.float().numpy())
    write_whole(arguments.output, content.getvalue(), "--output")
    print(f"{arguments.output}: mu and logvar of {len(mu)} sentences, latent size {mu.shape[1]}")
    draw_posteriors(arguments, mu, logvar, None)


def posteriors_of(
    arguments: argparse.Namespace, model: LatentModel, sentences: Sequence[Sentence]
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron_lite.models.optimus.bounds import posteriors

    require_components(arguments, model)
    return posteriors(model, sentences, arguments.batch)


def require_components(arguments: argparse.Namespace, model: LatentModel) -> None:
    for axis in arguments.axes or []:
        if axis >= model.latent_size:
            raise ConfigError(
                f"--axes has {axis}, but the latent size is {model.latent_size}; use 0 to {model.latent_size - 1}."
            )


def draw_posteriors(
    arguments: argparse.Namespace, mu: torch.Tensor, logvar: torch.Tensor, labels: Sequence[str] | None
) -> None:
    from megatron_lite.models.optimus.latent import gaussian_kl

    if arguments.picture is not None:
        draw_picture(arguments, mu, gaussian_kl(mu, logvar), labels)


def draw_picture(
    arguments: argparse.Namespace, mu: torch.Tensor, divergence: torch.Tensor, labels: Sequence[str] | None
) -> None:
    from megatron_lite.models.optimus.picture import draw

    draw(arguments.picture, mu, divergence, labels, arguments.axes and tuple(arguments.axes))
    print(arguments.picture)


def write(arguments: argparse.Namespace, model: LatentModel, sentences: Sequence[Sentence]) -> None:
    """The commands whose result is texts: a line for each, after its place."""
    from megatron_lite.models.optimus.bounds import posteriors
    from megatron_lite.models.optimus.generation import analogy, decode_texts, interpolate, sample_prior

    if arguments.command == "sample":
        z = sample_prior(arguments.count, model.latent_size, arguments.seed)
        places = [str(number) for number in range(arguments.count)]
    else:
        mu, _ = posteriors(model, sentences, arguments.batch)
        z, places = mu, [sentence.text for sentence in sentences]
    if arguments.command == "interpolate":
        z = interpolate(mu, arguments.points)
        places = [f"{point / (arguments.points - 1):.2f}" for point in range(arguments.points)]
    elif arguments.command == "analogy":
        z, places = analogy(mu, arguments.scale), ["analogy"]
    texts = decode_texts(model, z, generation(arguments), arguments.batch)
    for place, text in zip(places, texts, strict=True):
        print(f"{place}\t{text}")
    if arguments.json is not None:
        given = [sentence.text for sentence in sentences]
        written = [{"place": place, "text": text} for place, text in zip(places, texts, strict=True)]
        write_json(arguments.json, {"command": arguments.command, "given": given, "written": written})


def probe(
    arguments: argparse.Namespace, model: LatentModel, sentences: Sequence[Sentence], labels: Sequence[str]
) -> None:
    from megatron_lite.models.optimus.probe import accuracies, largest_class

    mu, logvar = posteriors_of(arguments, model, sentences)
    probed = {
        "latent vector (mu)": mu,
        "encoder's feature": features(model, sentences, arguments.batch),
        "same, untrained model": features(model.untrained(), sentences, arguments.batch),
    }
    rows = []
    for per_class in arguments.labels_per_class or [None]:
        for name, values in probed.items():
            options = {"per_class": per_class, "trials": arguments.trials, "seed": arguments.seed}
            found = accuracies(values, labels, **options)
            rows.append({"features": name, "labels_per_class": per_class, "accuracies": found})
    print(probe_table(rows, largest_class(labels)))
    if arguments.json is not None:
        result = {"checkpoint": str(arguments.checkpoint), "sentences": len(labels), "probes": rows}
        write_json(arguments.json, {**result, "largest_class": largest_class(labels)})
    draw_posteriors(arguments, mu, logvar, labels)


def features(model: LatentModel, sentences: Sequence[Sentence], batch: int) -> torch.Tensor:
    import torch

    starts = range(0, len(sentences), batch)
    return torch.cat([model.features(sentences[first : first + batch]).cpu() for first in starts])


def probe_table(rows: Sequence[dict[str, Any]], largest: float) -> str:
    from statistics import mean, pstdev

    lines = []
    for row in rows:
        found, count = row["accuracies"], row["labels_per_class"]
        learnt = "80 % learnt" if count is None else f"{count} training sentences per class"
        lines.append(f"{row['features']:24}{learnt:26}accuracy {mean(found):.4f} +- {pstdev(found):.4f}")
    return "\n".join([*lines, f"{'the largest class':24}{'nothing learnt':26}accuracy {largest:.4f}"])


def write_json(path: Path, result: Any) -> None:
    write_whole(path, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode(), "--json")


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
