"""Records -> samples, for every kind of task and every form of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data_utils.base.errors import ConfigError
from data_utils.tasks.base import Record, TaskSample
from data_utils.tasks.cloze import Cloze
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.forms import Form
from data_utils.tasks.inputs import Inputs, Kind
from data_utils.text.tokenizers import Tokenizer

KINDS_OF_TASK: dict[str, Callable[[Inputs, Sequence[str]], Kind]] = {
    "cloze": Cloze,
}


class Renderer:
    """Makes the samples of a task. All of it is pure: (seed, number, epoch, record) -> sample.

    Args:
        form: of the run's inputs (forms.py).
        seed: that of the run.
        labels: the classes or tags in the order of their numbers; () where the kind has none.
    Raises: ConfigError for a pattern or verbalizers that do not exist or do not go together.
    """

    def __init__(
        self, config: TaskConfig, tokenizer: Tokenizer, form: Form, seed: int, labels: Sequence[str] = ()
    ) -> None:
        if config.kind not in KINDS_OF_TASK:
            raise ConfigError(f"task.kind {config.kind} is not known here; choose another.")
        self.inputs = Inputs(config, tokenizer, form, seed)
        self.kind = KINDS_OF_TASK[config.kind](self.inputs, labels)

    @property
    def head(self) -> str:
        """How the samples' parts are scored: one of HEADS."""
        return self.kind.head

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes or tags in the order of their numbers."""
        return getattr(self.kind, "labels", ())

    def check(self) -> None:
        """Raise ConfigError for what can be known before any record is read: form, tokens, lengths."""
        self.kind.check()

    def prepare(self, records: Sequence[Record], *, training: bool) -> list[Record]:
        """The records that `sample` takes: more or fewer than the file's where the kind says so."""
        return self.kind.prepare(records, training=training)

    def sample(self, record: Record, number: int, epoch: int = 0) -> TaskSample:
        """The sample of a prepared record.

        Args: number, epoch: decide what is drawn at random.
        Raises: DataError for a record that gives no sample.
        """
        return self.kind.sample(record, number, epoch)
