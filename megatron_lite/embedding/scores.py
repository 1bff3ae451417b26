"""How good vectors are: scores of sentence pairs, retrieval, reranking.

    sts         Spearman's correlation of the similarity with people's scores
    retrieval   nDCG@10, MRR@10, MAP and recall@k of the documents that are nearest to each query
    reranking   the same of each query's own texts

Measures of rankings are computed by ir_measures, and so by trec_eval. As in BEIR a document with the query's own id is
left out, and the SEARCHED nearest count.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from data_utils.common.errors import ConfigError
from data_utils.common.progress import progress_bar
from data_utils.tasks.metrics.metrics import spearman
from data_utils.tasks.readers.similarity import Retrieval, ScoredPairs
from megatron_lite.embedding.embedder import Embedder, TextFormat, embedding_config
from megatron_lite.inference.open_run import Run

SEARCHED = 1000
RANKING_MEASURES = ("nDCG@10", "RR@10", "AP", "R@1", "R@10", "R@100")
_SHOWN_NAMES = {"RR@10": "MRR@10", "AP": "MAP", "R@1": "recall@1", "R@10": "recall@10", "R@100": "recall@100"}
_CHUNK = 1024  # texts or queries at a time
Embed = Callable[[Sequence[str], str], np.ndarray]


def require_ir_measures() -> None:
    if importlib.util.find_spec("ir_measures") is None:
        raise ConfigError(
            "measures of rankings need the package ir_measures; install it: pip install ir_measures."
        )


class VectorScores:
    """Measures of a run's vectors.

    Args: settings: of the section `embedding`, on top of the run's.
    """

    def __init__(self, run: Run, settings: Mapping[str, object]):
        self.run, self.config = run, embedding_config(run, settings)

    def embed(self, texts: Sequence[str], role: str | None = None) -> torch.Tensor:
        """fp32 [texts, D]. Args: role: query or document, whose prompt is taken if there is one of this name."""
        prompt = role if role in self.config.prompts else None
        embedder = Embedder(self.run, TextFormat(self.run, self.config, prompt))
        found = []
        with progress_bar(total=len(texts), unit="text") as bar:
            for start in range(0, len(texts), _CHUNK):
                found.append(embedder.embed(texts[start : start + _CHUNK]))
                bar.update(len(found[-1]))
        return torch.from_numpy(np.concatenate(found))

    def sts(self, pairs: ScoredPairs) -> dict[str, float]:
        texts = list(dict.fromkeys([*pairs.first, *pairs.second]))  # equal ones are computed once
        number = {text: index for index, text in enumerate(texts)}
        vectors = self.embed(texts)
        first, second = (
            vectors[[number[text] for text in side]][:, None] for side in (pairs.first, pairs.second)
        )
        found = similarity(first, second, self.config.similarity)[:, 0, 0]
        return {"spearman": 100 * spearman(found.tolist(), pairs.scores)}

    def retrieval(self, task: Retrieval) -> dict[str, float]:
        names = list(task.documents)
        documents = self.embed([task.documents[name] for name in names], "document")
        ids = list(task.queries)
        queries = self.embed([task.queries[query] for query in ids], "query")
        ranking: dict[str, dict[str, float]] = {}
        for start in range(0, len(ids), _CHUNK):
            found = similarity(queries[start : start + _CHUNK], documents, self.config.similarity)
            # One more, for the document with the query's id.
            nearest = found.topk(min(SEARCHED + 1, len(names)))
            for query, values, indices in zip(
                ids[start : start + _CHUNK], *map(torch.Tensor.tolist, nearest), strict=True
            ):
                scored = {
                    names[i]: value for value, i in zip(values, indices, strict=True) if names[i] != query
                }
                ranking[query] = dict(list(scored.items())[:SEARCHED])
        return ranking_measures(task.relevant, ranking)

    def reranking(self, queries: Sequence[tuple[str, list[str], list[str]]]) -> dict[str, float]:
        texts = list(dict.fromkeys(text for _, *lists in queries for each in lists for text in each))
        number = {text: index for index, text in enumerate(texts)}
        documents = self.embed(texts, "document")
        of_queries = self.embed([query for query, *_ in queries], "query")
        relevant, ranking = {}, {}
        for index, (_, positive, negative) in enumerate(queries):
            own = list(dict.fromkeys([*positive, *negative]))
            chosen = documents[[number[text] for text in own]]
            found = similarity(of_queries[index : index + 1], chosen, self.config.similarity)[0].tolist()
            ranking[str(index)] = {str(number[text]): value for text, value in zip(own, found, strict=True)}
            relevant[str(index)] = {str(number[text]): 1 for text in positive}
        return ranking_measures(relevant, ranking)


def similarity(first: torch.Tensor, second: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 [..., N, D], [..., M, D] -> [..., N, M]; larger is more alike. Args: kind: one of SIMILARITIES."""
    if kind == "euclidean":
        return -torch.cdist(first, second)
    if kind == "manhattan":
        return -torch.cdist(first, second, p=1)
    if kind == "cosine":
        first, second = (torch.nn.functional.normalize(each, dim=-1) for each in (first, second))
    return first @ second.transpose(-1, -2)


def ranking_measures(
    relevant: Mapping[str, Mapping[str, int]], ranking: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Means over the queries, times 100. Args: relevant, ranking: query -> document -> relevance, or score."""
    require_ir_measures()
    import ir_measures

    measures = [ir_measures.parse_measure(name) for name in RANKING_MEASURES]
    found = ir_measures.calc_aggregate(measures, relevant, ranking)
    by_name = {str(measure): 100 * float(value) for measure, value in found.items()}
    return {_SHOWN_NAMES.get(name, name): by_name[name] for name in RANKING_MEASURES}
