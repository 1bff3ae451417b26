"""Show what an objective makes of text, or a task of its records: tokens, roles, positions, targets, attention mask.

    python scripts/inspect_batch.py --objective unilmv2 --text 'the cat sat on the mat and slept all day'
    python scripts/inspect_batch.py --config configs/tiny.yaml --samples 0 7 --png mask.png
    python scripts/inspect_batch.py --config configs/tiny.yaml --objective t5 --text 'Some text.' t5.noise_ratio=0.5
    python scripts/inspect_batch.py --config runs/glm/config.yaml --task configs/tasks/noisy_votes.yaml --samples 0 1

With --text and no --config every word is a token of its own and no file is needed. With --config and no --text
the samples of the run's training corpora are shown, as training sees them. With --task it is the records of the task's
training file (without one, of its first validation file), and what is scored of each: the rows of every part and their
tokens, classes or places.

Roles: context (order 0), content (revealed later), predicts (has a target), query (has a target and is never
revealed), hidden (never revealed, no target), label (CLS with a sentence-level class), slot (OPTIMUS: the latent
vector's). In the mask a row is a query and a column a key; the picture shows in orange the keys that are visible only
through a group.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_utils.common.batch_fields import FIELDS, Example
from data_utils.common.errors import (
    ArgumentParser,
    ConfigError,
    DataError,
    expanded_path,
    local_path,
    run_command,
)
from data_utils.common.files import require_writable
from data_utils.common.settings import build, parse_override
from data_utils.loader.loader import collate, open_datasets
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, SENTENCE_LEVEL, ObjectiveChoice, make_objective
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.tasks.base import TaskSample
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer, load_tokenizer
from data_utils.tokenizers.vocabulary import Vocabulary, vocabulary_of
from megatron_lite.config.tree import Config, load_config
from megatron_lite.transformer.attention_backends.layout import allowed

ROLE_NAMES = ("cls", "sep", "mask", "smask", "gmask", "sop", "eop", "eos", "pad", "unk", "dblock")
SENTENCES = LOSS_NAMES.index("reconstruction")
MAX_SAMPLES = 1 << 62  # as far as samples are numbered
MOST_COLUMNS = 100  # of the mask in the terminal; of a longer one, every n-th
SMALLEST_PICTURE = 512  # pixels: smaller masks are enlarged by a whole factor


@dataclass(frozen=True)
class Shown:
    """Rows to show, and how to spell a token.

    Args:
        titles: of the rows; none: the numbers of the samples.
        notes: lines after the table of each.
    """

    rows: list[Example]
    spell: Callable[[int], str]
    spell_decoders: Callable[[int], str] | None = None  # where the decoder has its own vocabulary
    titles: list[str] = field(default_factory=list)
    notes: list[list[str]] = field(default_factory=list)


def main() -> None:
    arguments = parse_arguments()
    if arguments.task:
        shown = rows_of_task(arguments)
    else:
        shown = rows_of_words(arguments) if not arguments.config else rows_of_config(arguments)
    titles = shown.titles or [f"sample {number}" for number in arguments.samples]
    notes = shown.notes or [[]] * len(titles)
    for title, row, more in zip(titles, shown.rows, notes, strict=True):
        print(title)
        print("\n".join([table(row, shown.spell, shown.spell_decoders, arguments.lines), *more]))
        seen, _ = masks(row)
        print(f"\nattention of {len(seen)} tokens (columns: keys){thinned(len(seen))}")
        print(drawing(seen))
    if arguments.png:
        save_picture(Path(arguments.png), *masks(shown.rows[0]))
        print(f"wrote {arguments.png}: {titles[0]}")


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "YAML file, or a name in configs/; may be repeated"
    add("--config", type=expanded_path, action="append", default=[], metavar="FILE", help=text)
    add("--objective", metavar="NAME", help=f"instead of the config's: {', '.join(OBJECTIVES)}")
    add("--text", help="show this text as one document")
    add("--task", type=expanded_path, metavar="FILE", help="YAML of a task whose records are shown")
    text = "sample numbers (default 0)"
    add("--samples", type=_sample_number, nargs="+", default=[0], metavar="N", help=text)
    add(
        "--lines",
        type=int,
        default=60,
        metavar="N",
        help="number of tokens to show per sequence; 0 = all (default 60)",
    )
    add("--png", type=local_path, metavar="FILE", help="save the mask of the first sample as a picture")
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top")
    arguments = parser.parse_intermixed_args()
    if not 0 <= min(arguments.samples) <= max(arguments.samples) < MAX_SAMPLES:
        wrong = next(number for number in arguments.samples if not 0 <= number < MAX_SAMPLES)
        raise ConfigError(f"--samples is {wrong}; it must be 0 or more, and below 2^62.")
    if arguments.lines < 0:
        raise ConfigError(f"--lines is {arguments.lines}; it must be 0 or more.")
    if arguments.task and (not arguments.config or arguments.text is not None or arguments.objective):
        raise ConfigError("--task shows the records of a task; combine it with --config FILE only.")
    if not arguments.config and arguments.text is None:
        raise ConfigError("nothing to show; give --text TEXT, --config FILE, or both.")
    if arguments.png:
        require_writable(Path(arguments.png), "--png")
    return arguments


def _sample_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        hint = "; settings go before --samples" if "=" in text else ""
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a sample number{hint}") from None


def rows_of_words(arguments: argparse.Namespace) -> Shown:
    """A text whose words are its vocabulary."""
    words = arguments.text.split()
    names = {
        f"[{name}]" if name not in ("sop", "eop", "eos") else name: i for i, name in enumerate(ROLE_NAMES)
    }
    ids = dict(names)
    for word in words:
        ids.setdefault(word, len(ids))
    size = len(ids)  # without T5's sentinels, of which each word may need one
    sentinels = tuple(ids.setdefault(f"<extra_id_{k}>", len(ids)) for k in range(len(words)))
    spelled = list(ids)
    special = SpecialTokens(**{name: i for i, name in enumerate(ROLE_NAMES)})
    ends = np.array([word not in names and word.endswith((".", "?", "!")) for word in spelled])
    vocabulary = Vocabulary(
        special, len(ids), ends, np.ones(len(ids), bool), tuple(spelled), num_tokens=size, sentinels=sentinels
    )
    name = arguments.objective or "blank_infilling"
    if name not in OBJECTIVES:
        raise ConfigError(f"--objective is {name!r}; it must be one of {', '.join(OBJECTIVES)}.")
    tree: dict = {}
    for override in arguments.overrides:
        parsed = parse_override(override)
        if set(parsed) != {name}:
            raise ConfigError(
                f"override {override!r}: without --config only settings of {name} apply; write {name}.KEY=VALUE."
            )
        tree.update(parsed[name])
    section = build(OBJECTIVES[name].config_class, tree, f"{name}.")
    tokens = np.array([ids[word] for word in words] + [special.eos], np.int32)
    rows = rows_of_text([tokens], (ObjectiveChoice(name, section),), vocabulary, 0, arguments.samples)
    return Shown(rows, spelled.__getitem__)


def rows_of_config(arguments: argparse.Namespace) -> Shown:
    """Samples of a run's corpora, or one text in the run's tokens."""
    overrides = list(arguments.overrides)
    if arguments.objective:
        overrides.append(f"objectives={{{arguments.objective}: 1}}")
    config: Config = load_config(arguments.config, overrides)
    choices = config.objective_choices
    if arguments.objective:  # alone, whatever the files mix
        choices = tuple(choice for choice in choices if choice.name == arguments.objective)
    if config.tokenizer is None:
        raise ConfigError("the configuration has no tokenizer; set tokenizer.kind and tokenizer.path.")
    tokenizer = load_tokenizer(config.tokenizer)
    decoders = None if config.decoder_tokenizer is None else load_tokenizer(config.decoder_tokenizer)
    spell = tokenizer.token_to_text, None if decoders is None else decoders.token_to_text
    seed = config.training.seed
    if arguments.text is None:
        phases = [] if arguments.objective else config.phase_plan.samples
        unit = config.sample_unit
        train = open_datasets(config.data, choices, tokenizer, seed, decoders, phases, unit).train
        rows = [train.batch(np.array([sample]))[0] for sample in arguments.samples]
        return Shown([Example.from_fields(row) for row in rows], *spell)
    chunks = [ended(arguments.text, each) for each in (tokenizer, decoders) if each is not None]
    rows = rows_of_text(chunks, choices, vocabulary_of(tokenizer, decoders), seed, arguments.samples)
    return Shown(rows, *spell)


def ended(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """A text as a document of a corpus, int32."""
    eos = tokenizer.special.eos
    return np.array([*tokenizer.encode(text), *([eos] if eos != NO_TOKEN else [])], np.int32)


def rows_of_task(arguments: argparse.Namespace) -> Shown:
    """Documents of a task's records, as the model of the configuration reads them."""
    from megatron_lite.finetune.setup import load_tree, located_settings, prepare

    with located_settings(arguments.config, arguments.task, arguments.overrides):
        task = prepare(load_tree(arguments.config, arguments.task, arguments.overrides))
    records = list(task.train)
    if not records:
        file = next(iter({**task.validation, **task.test}), None)
        if file is None:
            raise ConfigError("the task has no file; set task.train or task.validation.")
        records = task.renderer.prepare({**task.validation, **task.test}[file], training=False)
    spell = task.tokenizer.token_to_text
    shown = Shown([], spell, None, [], [])
    for number in arguments.samples:
        if number >= len(records):
            raise ConfigError(
                f"--samples contains {number}, but the task has {len(records)} records; give a smaller number."
            )
        sample = task.renderer.sample(records[number], number)
        count = len(sample.documents)
        for place, example in enumerate(sample.documents):
            shown.titles.append(f"sample {number}" + (f", document {place} of {count}" if count > 1 else ""))
            shown.rows.append(example)
            shown.notes.append(
                scored(sample, place, task.renderer.head, task.renderer.labels, spell)
                + ([f"{sample.cut} tokens were cut off"] if sample.cut else [])
            )
    return shown


def scored(
    sample: TaskSample, document: int, head: str, labels: Sequence[str], spell: Callable[[int], str]
) -> list[str]:
    """A line for each part of a document: its rows, and their targets."""
    lines = []
    for number, part in enumerate(sample.target_groups):
        if part.document != document:
            continue
        places = [int(row) for row in part.positions]
        rows = f"row {places[0]}" if len(places) == 1 else f"rows {places[0]} to {places[-1]}"
        if head == "values":
            says = f"{part.value:g}"
        elif head == "sets":
            names = (labels[i] for i in np.flatnonzero(part.targets).tolist())
            says = " ".join(names) or ("none" if len(part.targets) else "no label")
        elif head == "spans":
            says = " to ".join(f"row {places[i]}" for i in part.targets) or "no label"
        else:
            name = spell if head == "choices" else labels.__getitem__
            says = " ".join(visible(name(int(target))) for target in part.targets) or "no label"
        is_right = " (right)" if number == sample.right else ""
        lines.append(f"scored: group {number}, {rows}: {says}{is_right}")
    return lines


def rows_of_text(
    chunks: Sequence[np.ndarray],
    choices: Sequence[ObjectiveChoice],
    vocabulary: Vocabulary,
    seed: int,
    samples: Sequence[int],
) -> list[Example]:
    """One document under several sample numbers, without padding.

    Args: chunks: its tokens, and then those of a decoder with a vocabulary of its own.
    """
    lengths = np.array([len(chunk) for chunk in chunks])
    if lengths.min() < 2:
        raise DataError("--text has no token; give at least one word.")
    made = make_objective(choices, vocabulary, seed, int(lengths.max()) + DOCUMENT_OVERHEAD)
    counts = np.full(len(samples), len(chunks))
    tokens = np.tile(np.concatenate(chunks), len(samples))
    batch = collate(made, tokens, np.tile(lengths, len(samples)), counts, np.array(samples))
    return [Example.from_fields(row[:, row[FIELDS.index("doc")] >= 0]) for row in batch]


def role(row: Example, i: int) -> str:
    """The role of token `i`; see the top of this file."""
    if row.doc[i] < 0:
        return "padding"
    if row.weights[i] > 0 and LOSS_NAMES[row.objective[i]] in SENTENCE_LEVEL:
        return "label"
    if row.ord[i] < 0:
        return "query" if row.weights[i] > 0 else "hidden"
    if row.weights[i] > 0:
        return "predicts"
    if row.objective[i] == SENTENCES and row.ord[i] > 0:
        return "slot"
    return "context" if row.ord[i] == 0 else "content"


def table(
    row: Example,
    spell: Callable[[int], str],
    spell_decoders: Callable[[int], str] | None = None,
    most: int = 0,
) -> str:
    """One line per token; the padding at the end as a count. Tokens of an order above 0 are the decoder's.

    Args: most: lines of a longer row, half of them of its beginning and half of its end; 0 = all.
    """
    length = int((row.doc >= 0).sum())
    spells = [spell if order <= 0 else spell_decoders or spell for order in row.ord.tolist()]
    words = [visible(spells[i](token)) for i, token in enumerate(row.tokens[:length].tolist())]
    lines = [
        f"{'row':>4} {'token':16} {'role':9} {'target':16} {'pos0':>4} {'pos1':>4} {'seg':>3} {'doc':>3} "
        f"{'ord':>4} {'grp':>3}  objective"
    ]
    hidden = range(most // 2, length - most // 2) if 0 < most < length else range(0)
    for i in range(length):
        if i in hidden:
            if i == hidden[0]:
                lines.append(f"{'':4} and {len(hidden)} more tokens (--lines 0 shows all)")
            continue
        target = ""
        if row.weights[i] > 0:
            is_label = role(row, i) == "label"
            target = f"class {row.targets[i]}" if is_label else visible(spells[i](int(row.targets[i])))
        lines.append(
            f"{i:4} {words[i]:16} {role(row, i):9} {target:16} {row.position_ids[i]:4} "
            f"{row.block_position_ids[i]:4} {row.segment_ids[i]:3} {row.doc[i]:3} {row.ord[i]:4} {row.grp[i]:3}  "
            f"{LOSS_NAMES[row.objective[i]]}"
        )
    if length < len(row.doc):
        lines.append(f"{'':4} and {len(row.doc) - length} padding tokens")
    return "\n".join(lines)


def visible(text: str) -> str:
    """A token on one line, spaces shown, at most 16 characters."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text).replace(" ", "_")
    return shown if len(shown) <= 16 else shown[:15] + "…"


def masks(row: Example) -> tuple[np.ndarray, np.ndarray]:
    """Bool [queries, keys] without padding: what the attention rule allows, and what only a group allows."""
    content = row.doc >= 0
    doc, order, grp = (field[content][None] for field in (row.doc, row.ord, row.grp))
    seen = allowed(doc, order, grp)[0]
    # OPTIMUS: the latent vector alone joins encoder and decoder.
    if (row.objective[content] == SENTENCES).all():
        is_decoders = order[0] > 0
        seen &= is_decoders[:, None] == is_decoders
    return seen, seen & ~allowed(doc, order, np.zeros_like(grp))[0]


def step_of(size: int) -> int:
    return -(-size // MOST_COLUMNS)


def thinned(size: int) -> str:
    return f", one of every {step_of(size)}" if step_of(size) > 1 else ""


def drawing(seen: np.ndarray) -> str:
    """The mask in characters, two rows to a line."""
    step = step_of(len(seen))
    small = seen[::step, ::step]
    if len(small) % 2:
        small = np.vstack([small, np.zeros((1, small.shape[1]), bool)])
    upper, lower = small[::2], small[1::2]
    return "\n".join(
        "".join(" ▄▀█"[2 * a + b] for a, b in zip(*pair, strict=True))
        for pair in zip(upper, lower, strict=True)
    )


def save_picture(path: Path, seen: np.ndarray, by_group: np.ndarray) -> None:
    """The mask as PNG: visible dark blue, only by a group orange. Raises DataError if it cannot be written."""
    import matplotlib.image

    picture = np.full((*seen.shape, 3), 255, np.uint8)
    picture[seen] = (33, 62, 120)
    picture[by_group] = (230, 140, 30)
    factor = max(1, -(-SMALLEST_PICTURE // len(seen)))
    try:
        matplotlib.image.imsave(path, picture.repeat(factor, 0).repeat(factor, 1), format="png")
    except OSError as error:
        raise DataError(f"--png {path}: {error.strerror}; choose a writable file.") from None


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
