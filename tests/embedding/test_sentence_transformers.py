"""Directories of sentence-transformers: imported, embedded and exported with equal vectors, or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.systems.embeddings import TEXTS, encoded, released_directory, write, write_sentence_transformers

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge
from megatron_lite.embedding.embedder import Embedder, TextFormat
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import load_run

PROMPTS = {"prompts": {"query": "the fox: ", "document": ""}, "default_prompt_name": "query"}


def embedded(path, texts=TEXTS, prompt=None):
    run = load_run(path)
    return Embedder(run, TextFormat(run, prompt=prompt), batch_tokens=48).embed(texts)


CASES = [
    ("bert", "mean", {}),
    ("bert", "mean", {"include_prompt": False, **PROMPTS}),
    ("roberta", "cls", {"normalize": False, **PROMPTS}),
    ("t5", "mean", {"similarity_fn_name": "dot"}),
    ("qwen2", "last", {"normalize": False}),
]


@pytest.mark.parametrize(("case", "pooling", "options"), CASES)
def test_vectors_equal_those_of_sentence_transformers_both_ways(case, pooling, options, tmp_path):
    source = write_sentence_transformers(tmp_path / "source", case, pooling, **options)
    texts = [text for text in TEXTS if text or case != "qwen2"]  # which has no token for an empty text
    expected = encoded(source, texts)
    import_directory(source, tmp_path / "run", {}, verify=False)
    assert np.abs(embedded(tmp_path / "run", texts) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    options = ExportOptions(sentence_transformers=True, verify=False)
    export_run(tmp_path / "run", tmp_path / "export", options)
    assert np.abs(encoded(tmp_path / "export", texts) - expected).max() < 1e-6
    before, after = (
        json.loads((tmp_path / name / "config_sentence_transformers.json").read_text())
        for name in ("source", "export")
    )
    assert after["similarity_fn_name"] == before.get("similarity_fn_name", "cosine")
    assert after["default_prompt_name"] == before.get("default_prompt_name")


@pytest.mark.slow
def test_the_released_minilm_is_imported_embedded_and_exported(tmp_path):
    """A user's path, with the comparison that both commands make themselves."""
    source = released_directory(tmp_path / "minilm")
    expected = encoded(source)
    import_directory(source, tmp_path / "run", {"embedding": {"prompts": {"query": "query: "}}})
    assert np.abs(embedded(tmp_path / "run") - expected).max() < 1e-6
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions(sentence_transformers=True))
    assert np.abs(encoded(tmp_path / "export") - expected).max() < 1e-6
    query = encoded(tmp_path / "export", prompt_name="query")
    assert np.abs(embedded(tmp_path / "run", prompt="query") - query).max() < 1e-6
    proof = json.loads((tmp_path / "export" / "proof.json").read_text())
    assert proof["comparisons"]["vectors"]["largest_difference"] < 1e-6
    card = (tmp_path / "export" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and "| tokens of a text | 256 |" in card


def test_glm_itself_is_exported_with_its_code(tmp_path):
    """All of a text is part A; the export compares the vectors with those of sentence-transformers."""
    settings = merge(tree(write_vocabulary(tmp_path)), {"embedding": {"max_length": 16}})
    write_run(tmp_path / "run", settings)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions(sentence_transformers=True))
    comparisons = json.loads((tmp_path / "export" / "proof.json").read_text())["comparisons"]
    assert comparisons["vectors"]["largest_difference"] < 1e-5


def test_vectors_of_bart_are_not_exported(tmp_path):
    """The package would take its decoder's states."""
    source = write_sentence_transformers(tmp_path / "source", "bart")
    import_directory(source, tmp_path / "run", {}, verify=False)
    with pytest.raises(CheckpointError, match="the decoder's states"):
        export_run(tmp_path / "run", tmp_path / "export", ExportOptions(sentence_transformers=True))
    assert not (tmp_path / "export").exists()


def test_a_decoder_reads_texts_without_a_beginning_if_it_is_told(tmp_path):
    """This Llama's tokenizer writes no token before a text."""
    source = write_sentence_transformers(tmp_path / "source", "llama", "last")
    with pytest.raises(CheckpointError, match=r"causal\.begin is"):
        import_directory(source, tmp_path / "run", {}, verify=False)
    import_directory(source, tmp_path / "run", {"causal": {"begin": "none"}}, verify=False)


MODULES = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
POOLED = [*MODULES, {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "modules.json",
            [*POOLED, {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}],
            "Dense",
        ),
        ("modules.json", MODULES, "modules Transformer"),
        ("modules.json", [{"idx": 0, "path": "", "type": "custom_st.Transformer"}], "custom_st.Transformer"),
        ("modules.json", [{**POOLED[0], "path": "/etc"}, POOLED[1]], "outside"),
        ("modules.json", {"a": 1}, "modules.json"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pools by max"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "pools by mean, cls"),
        ("sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
    ],
)
def test_what_is_not_computed_here_is_refused(file, content, message, tmp_path):
    source = write_sentence_transformers(tmp_path / "source")
    write(source / file, content)
    with pytest.raises(CheckpointError, match=message):
        import_directory(source, tmp_path / "run", {}, verify=False)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_writes_other_tokens_around_a_text_is_refused(tmp_path):
    """Decoders whose tokenizer ends texts with a token, which their run does not."""
    source = write_sentence_transformers(tmp_path / "source", "gpt2", "last")
    path = source / "tokenizer.json"
    if not path.exists():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(source)
    described = json.loads(path.read_text())
    end = next(each for each in described["added_tokens"] if each["special"])
    token = {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}]
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end["content"]: token},
    }
    path.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="vectors would differ"):
        import_directory(source, tmp_path / "run", {}, verify=False)
    assert not (tmp_path / "run").exists()
