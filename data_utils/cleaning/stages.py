"""A cleaning run as stages of datatrove: each is a pipeline that a number of tasks run.

    filter             read, filter, write; signatures of exact duplicates
    exact              find exact duplicates
    signatures         of near-duplicates, of the documents that are no exact duplicates
    held_out, index    the same of texts that are held out; an index of these
    buckets, clusters  pairs of near-duplicates; which document of each group stays; groups that the report shows
    write              read what `filter` wrote, leave out duplicates, write the output

Documents are numbered by (task, position), which is the order of the input for any number of tasks (reader.py). So the
same document of a group stays for any number: of exact duplicates the first of the input, of near-duplicates the one
that datatrove's union-find makes the root, which follows from the order of the numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashBuildIndex,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from data_utils.build.contamination import EvaluationTexts
from data_utils.cleaning.counts import CountFile
from data_utils.cleaning.filters import (
    ComparedWords,
    Contamination,
    KeepFilter,
    NotEmpty,
    make_filter,
    word_tokenizer,
)
from data_utils.cleaning.groups import FindGroups, ShowGroups
from data_utils.cleaning.keep import Keep
from data_utils.cleaning.reader import CorpusReader, Reading, ranges_of_tasks
from data_utils.cleaning.recipe import NearDuplicates, Recipe
from data_utils.cleaning.writers import CleanText, RemovedDocuments
from data_utils.corpus.documents import FileRange
from data_utils.corpus.stored_files import InputFile

MAX_TASKS = 60_000  # an exact duplicate's priority is a number of 16 bits
# 64 bits of SHA-1, as in the run that made FineWeb; xxhash is faster, and one more package.
_HASH = HashConfig(precision=64, hash_fc="sha1")


@dataclass(frozen=True, slots=True)
class CleaningStage:
    """A pipeline and the number of its tasks."""

    name: str
    tasks: int
    pipeline: list[PipelineStep]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The texts of a run."""

    paths: Sequence[InputFile]
    held_out: Sequence[InputFile]
    evaluation: EvaluationTexts | None
    bad_evaluation_texts: dict[str, int]  # type of problem -> number of records
    reading: Reading


@dataclass(frozen=True, slots=True)
class WorkFolders:
    """Where a run keeps what its stages write."""

    root: Path

    def counts(self, step: str) -> CountFile:
        return CountFile(self.root / "counts" / step)

    def logs(self, stage: str) -> str:
        return str(self.root / "logs" / stage)

    def data(self, name: str) -> str:
        return str(self.root / "data" / name)

    @property
    def output(self) -> Path:
        """The directory that is renamed at the end; the text is in `text` below it."""
        return self.root / "output"


def removal_steps(recipe: Recipe, decontaminates: bool) -> list[str]:
    """The steps that remove documents, or report them, in order: the names of their counts."""
    names = ["keep"] if recipe.keep is not None else []
    names += recipe.filters.chosen
    names += ["contamination"] if decontaminates else []
    names += ["exact_duplicates"] if recipe.exact_duplicates else []
    return [*names, "near_duplicates"] if recipe.near_duplicates is not None else names


def make_stages(recipe: Recipe, inputs: Inputs, folders: WorkFolders, tasks: int) -> list[CleaningStage]:
    """The stages, in order; each begins when all tasks of the one before it are done."""
    words = word_tokenizer(recipe)
    output = CleanText(str(folders.output / "text"), recipe.fields, folders.counts("written"))
    ranges = ranges_of_tasks(inputs.paths, inputs.reading, tasks)
    read = CorpusReader(ranges, inputs.reading, recipe.field_names, folders.counts("read"))
    first = [read, *_filters(recipe, inputs.evaluation, folders, words)]
    if not (recipe.exact_duplicates or recipe.near_duplicates):
        return [CleaningStage("filter", tasks, [*first, output])]
    first.append(JsonlWriter(folders.data("filtered"), compression="zstd"))
    stages, without_exact, without_near = [], [], []
    if recipe.exact_duplicates:
        first.append(ExactDedupSignature(folders.data("exact_signatures"), _exact_config()))
        find = ExactFindDedups(folders.data("exact_signatures"), folders.data("exact"), _exact_config())
        stages.append(CleaningStage("exact", 1, [find]))
        without_exact = [ExactDedupFilter(folders.data("exact"), _exact_config())]
    if recipe.near_duplicates is not None:
        pipeline = [_filtered(folders), *without_exact]
        compared = ComparedWords() if recipe.words == "spaces" else words
        stages += _near(recipe.near_duplicates, inputs, folders, pipeline, tasks, compared)
        without_near = [
            ShowGroups(folders.counts("groups"), folders.counts("stayed")),
            MinhashDedupFilter(folders.data("clusters"), _removed("near_duplicates", folders)),
        ]
    if without_exact:
        removed = _removed("exact_duplicates", folders)
        without_exact = [ExactDedupFilter(folders.data("exact"), _exact_config(), removed)]
    last = [_filtered(folders), *without_exact, *without_near, output]
    return [CleaningStage("filter", tasks, first), *stages, CleaningStage("write", tasks, last)]


def _filters(
    recipe: Recipe, evaluation: EvaluationTexts | None, folders: WorkFolders, words: WordTokenizer
) -> list[PipelineStep]:
    steps: list[PipelineStep] = []
    if recipe.keep is not None:
        steps.append(KeepFilter(Keep(recipe.keep), _removed("keep", folders)))
    for name, rules in recipe.filters.chosen.items():
        steps.append(make_filter(name, rules, words, _removed(name, folders)))
        if name == "c4":
            steps.append(NotEmpty(_removed("c4", folders, "empty")))
    if evaluation is not None:
        found = _removed("contamination", folders)
        steps.append(Contamination(evaluation, recipe.contaminated == "remove", found))
    return steps


def _removed(name: str, folders: WorkFolders, step: str = "") -> RemovedDocuments:
    return RemovedDocuments(name, folders.counts(f"removed/{name}{step and f'.{step}'}"))


class _FilteredReader(JsonlReader):
    """What the same task of the stage `filter` wrote; nothing where it wrote no file.

    datatrove deals out the files that exist, so a task without documents would shift the numbers of those behind it.
    """

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        name = f"{rank:05d}.jsonl.zst"
        if self.data_folder.isfile(name):
            yield from self.read_files_shard([name])


def _filtered(folders: WorkFolders) -> JsonlReader:
    return _FilteredReader(folders.data("filtered"), add_file_path=False)


def _exact_config() -> ExactDedupConfig:
    return ExactDedupConfig(content_getter=_text, document_priority=_earlier_tasks_first, hash_config=_HASH)


def _text(document: Document) -> str:
    return document.text


def _earlier_tasks_first(document: Document) -> int:
    """Of equal texts datatrove keeps the one of the highest priority, then of the lowest position in its task."""
    return MAX_TASKS + 1 - document.metadata["task"]


def minhash_config(rules: NearDuplicates) -> MinhashConfig:
    return MinhashConfig(
        n_grams=rules.n_grams,
        num_buckets=rules.num_buckets,
        hashes_per_bucket=rules.hashes_per_bucket,
        hash_config=_HASH,
    )


def _near(
    rules: NearDuplicates,
    inputs: Inputs,
    folders: WorkFolders,
    documents: list[PipelineStep],
    tasks: int,
    words: WordTokenizer,
) -> list[CleaningStage]:
    """Args: documents: the steps that give the documents to compare."""
    config = minhash_config(rules)
    sign = MinhashDedupSignature(folders.data("signatures"), config, language=words)
    stages = [CleaningStage("signatures", tasks, [*documents, sign])]
    index = None
    if inputs.held_out:
        index = folders.data("index")
        signatures = folders.data("held_out_signatures")
        ranges: list[list[FileRange]] = ranges_of_tasks(inputs.held_out, inputs.reading, tasks)
        read = CorpusReader(ranges, inputs.reading, (), folders.counts("held_out"))
        sign = MinhashDedupSignature(signatures, config, language=words)
        build = MinhashBuildIndex(signatures, index, "held_out", config)
        stages += [
            CleaningStage("held_out", tasks, [read, sign]),
            CleaningStage("index", rules.num_buckets, [build]),
        ]
    pairs: Any = MinhashDedupBuckets(
        folders.data("signatures"), folders.data("pairs"), index, config, only_dedup_in_index=False
    )
    groups = MinhashDedupCluster(
        folders.data("pairs"), folders.data("clusters"), config, save_cluster_id=True
    )
    find = FindGroups(folders.data("clusters"), folders.counts("groups"))
    return [
        *stages,
        CleaningStage("buckets", rules.num_buckets, [pairs]),
        CleaningStage("clusters", 1, [groups, find]),
    ]
