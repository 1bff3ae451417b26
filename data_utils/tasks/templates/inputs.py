"""Common inputs of all kinds of tasks: settings, tokenizer, form of the model's inputs, seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from data_utils.common.errors import ConfigError, DataError
from data_utils.objectives.interface import token_of
from data_utils.tasks.base import Record, TaskSample
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.templates.examples import LOSS_OF_MASK
from data_utils.tasks.templates.forms import Form
from data_utils.tasks.templates.patterns import Piece
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.word_marks import is_chinese

# Which of the masks that a run has learnt a kind of task takes, the best first; kinds that are not named: [MASK].
_MASKS = {
    "seq2seq": ("smask", "gmask", "mask"),
    "language_modelling": ("gmask", "mask", "smask"),
    "lambada": ("gmask", "mask", "smask"),
}


class Kind(Protocol):
    """A kind of task: how its records become samples."""

    head: str  # one of HEADS

    @property
    def answers(self) -> str:
        """The type of predictions, a key of ANSWERS (metrics_by_task.py)."""

    def check(self) -> None:
        """Raise ConfigError for settings with which no sample can be made."""

    def prepare(self, records: Sequence[Record], *, training: bool) -> list[Record]:
        """The records that samples are made of: more, fewer or others than those of the file."""
        ...

    def sample(self, record: Record, number: int, epoch: int) -> TaskSample: ...


@dataclass(frozen=True)
class Tokens:
    """A piece of a sample in tokens."""

    ids: list[int]
    shortenable: bool


@dataclass(frozen=True)
class Inputs:
    config: TaskConfig
    tokenizer: Tokenizer
    form: Form
    seed: int

    @property
    def special(self) -> SpecialTokens:
        return self.tokenizer.special

    @property
    def start(self) -> list[int]:
        """The token before a text, which predicts its first one in the form causal; [] where there is none."""
        ids = (token_of(role, self.special) for role in self.form.writing.before)
        return [token for token in ids if token != NO_TOKEN]

    def mask(self) -> tuple[int, int]:
        """The blank's token, and the number of the loss that goes with it in pretraining."""
        if self.form.name != "glm":
            return self.special.mask, self.form.loss()
        preferred = _MASKS.get(self.config.kind, ("mask", "smask", "gmask"))
        name = self.config.mask
        if name == "auto":
            name = next((kind for kind in preferred if kind in self.form.masks), preferred[0])
        return getattr(self.special, name), LOSS_OF_MASK[name]

    def part_a(self, tokens: Sequence[int]) -> list[int]:
        """GLM's context: CLS first; eos last unless the text is to be continued at a final [gMASK]."""
        special = self.special
        is_open = bool(tokens) and tokens[-1] == special.gmask and special.gmask != special.mask
        return [special.cls, *tokens] if is_open else [special.cls, *tokens, special.eos]

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """The tokens and the end of a text, where the vocabulary has one."""
        return [*tokens] if self.special.eos == NO_TOKEN else [*tokens, self.special.eos]

    def encode(self, pieces: Sequence[Piece]) -> list[Tokens]:
        return [Tokens(self.tokenizer.encode(piece.text), piece.shortenable) for piece in pieces]

    def continuation(self, text: str) -> list[int]:
        """Tokens of a text that follows another: with the space before it, but for Chinese, which has none."""
        text = text.strip()
        return self.tokenizer.encode(text if is_chinese(text[:1]) else " " + text)

    def refuse_forms(self, allowed: Sequence[str], why: Mapping[str, str] | None = None) -> None:
        """Raise ConfigError unless the form is one of `allowed` and the vocabulary has its special tokens.

        Args: why: the reason for a form that is not.
        """
        name = self.form.name
        if name not in allowed:
            reason = (why or {}).get(name, "has no such layout")
            raise ConfigError(
                f"task.kind is {self.config.kind}, but the run's inputs have the form {name} "
                f"({self.form.objective}), which {reason}; give a run of the form {' or '.join(allowed)}."
            )
        lacking = sorted(self.tokenizer.lacking.intersection(self.form.roles))
        if lacking:
            raise ConfigError(
                f"inputs of the form {name} need the special tokens {', '.join(lacking)}, which the tokenizer lacks; "
                "set tokenizer.added_tokens to glm, or choose another task.form."
            )

    def cut(
        self, pieces: Sequence[Tokens], room: int, record: Record, *, at_start: bool = False
    ) -> tuple[list[Tokens], int]:
        """The pieces in at most `room` tokens, and how many tokens were cut.

        Tokens go from the ends (`at_start`: the beginnings) of shortenable pieces, always of the longest one.
        Raises: DataError if what must not be cut does not fit.
        """
        over = sum(len(piece.ids) for piece in pieces) - room
        if over <= 0:
            return list(pieces), 0
        lengths = {i: len(piece.ids) for i, piece in enumerate(pieces) if piece.shortenable}
        if over > sum(lengths.values()):
            needed = self.config.sequence_length + over - sum(lengths.values())
            raise DataError(
                f"{record.place}: the sample needs {needed} tokens with all that may be cut left out, but "
                f"task.sequence_length is {self.config.sequence_length}; set it to {needed} or more."
            )
        for _ in range(over):
            longest = max(lengths, key=lambda i: lengths[i])
            lengths[longest] -= 1
        kept = []
        for i, piece in enumerate(pieces):
            length = lengths.get(i, len(piece.ids))
            ids = piece.ids[len(piece.ids) - length :] if at_start else piece.ids[:length]
            kept.append(Tokens(ids, piece.shortenable))
        return kept, over


def flat(pieces: Sequence[Tokens]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


def covering(length: int, room: int, step: int) -> list[tuple[int, int]]:
    """[start, end) of windows of at most `room` that cover 0 .. length and start at most `step` apart."""
    step = min(step, room)
    starts = [0, *range(step, max(length - room + step, 1), step)]
    return [(start, min(start + room, length)) for start in starts]
