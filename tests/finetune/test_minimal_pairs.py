"""Minimal pairs: the scores of sentences equal plain loops over transformers' classes."""

import gzip
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support.commands import forked
from support.data.tokenizer_files import bert_vocab, write_bert
from support.hf.published_files import write_directory
from support.tasks.harness_runs import harness_run

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.readers.minimal_pairs import read_minimal_pairs
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.finetune import minimal_pairs
from megatron_lite.finetune.harness import Harness, HarnessOptions
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.inference.open_run import load_run

# Words of one and of several tokens, punctuation, and pairs of unequal length.
SENTENCES = [
    "the quick brown fox jumps.",
    "the lazy cats, over the dogs",
    "foxes jump quickly",
    "a b c d the",
]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The directory of transformers and the run that it becomes, by system."""
    made = {}

    def get(case):
        if case not in made:
            directory = tmp_path_factory.mktemp(case)
            write_directory(case, directory / "original")
            if case == "bert":
                size = json.loads((directory / "original/config.json").read_text())["vocab_size"]
                names = bert_vocab()
                write_bert(
                    directory / "original", [*names, *(f"w{i}" for i in range(size - len(names)))][:size]
                )
            import_directory(directory / "original", directory / "run", {})
            made[case] = directory / "original", directory / "run"
        return made[case]

    return get


def log_probabilities(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def left_to_right(model, tokenizer, sentence):
    ids = [tokenizer.convert_tokens_to_ids("<|endoftext|>"), *tokenizer(f" {sentence}")["input_ids"]]
    found = log_probabilities(model, ids)
    return sum(found[place - 1, ids[place]].item() for place in range(1, len(ids)))


def pseudo(model, tokenizer, sentence, whole_words):
    """arXiv:2305.10588 with the words of the fast tokenizer, or arXiv:1910.14659."""
    encoded = tokenizer(sentence)
    ids, words, total = encoded["input_ids"], encoded.word_ids(), 0.0
    for place in range(1, len(ids) - 1):
        masked = list(ids)
        for other in range(place, len(ids) - 1 if whole_words else place + 1):
            if words[other] == words[place]:
                masked[other] = tokenizer.mask_token_id
        total += log_probabilities(model, masked)[place, ids[place]].item()
    return total


@pytest.mark.parametrize(
    ("case", "score"),
    # Qwen2 has learnt without a token before a text, and is scored after eos, as by lm_eval.
    [
        ("gpt2", "left-to-right"),
        ("qwen2", "left-to-right"),
        ("bert", "words"),
        ("bert", "tokens"),
        ("roberta", "words"),
    ],
)
def test_scores_match_a_plain_loop(imported, case, score):
    original, run = imported(case)
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    described = json.loads((original / "config.json").read_text())
    classes = {
        "gpt2": "GPT2LMHeadModel",
        "qwen2": "Qwen2ForCausalLM",
        "bert": "BertForMaskedLM",
        "roberta": "RobertaForMaskedLM",
    }
    model = getattr(transformers, classes[case]).from_pretrained(original).eval()
    if score == "left-to-right":
        expected = [left_to_right(model, tokenizer, sentence) for sentence in SENTENCES]
    else:
        expected = [pseudo(model, tokenizer, sentence, score == "words") for sentence in SENTENCES]
    harness = Harness(load_run(run), size=3)
    assert described["vocab_size"] and minimal_pairs.default_score(harness.template) == (
        "words" if score == "tokens" else score
    )
    assert minimal_pairs.scored(harness, SENTENCES, score) == pytest.approx(
        expected, abs=2e-3
    )  # fp32 against fp64
    if case == "bert":  # words of several tokens make the two differ
        other = minimal_pairs.scored(harness, SENTENCES, "tokens" if score == "words" else "words")
        assert max(abs(a - b) for a, b in zip(other, expected, strict=True)) > 0.1


def test_glm_fills_each_word_and_its_end(tmp_path):
    run = harness_run(tmp_path, "blank_infilling")
    special, tokenizer = run.tokenizer.special, run.tokenizer
    sentence = "the foxes jump."
    tokens = tokenizer.encode(sentence)
    texts = [tokenizer.decode([token]) for token in tokens]
    starts = [place for place, text in enumerate(texts) if not text.startswith("##")]
    assert len(starts) < len(tokens)  # a word of several tokens is among them
    total, filler = 0.0, BlankFiller(run.model, special, GenerationConfig())
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        context = [special.cls, *tokens[:start], special.mask, *tokens[end:], special.eos]
        word = tokens[start:end]
        with torch.no_grad():
            logits = filler.write(filler.encoded([context]), [[special.sop, *word]], [start + 1])[0]
        found = torch.stack(list(logits)).double().log_softmax(-1)
        total += sum(found[i, token].item() for i, token in enumerate([*word, special.eop]))
    assert minimal_pairs.scored(Harness(run), [sentence], "blanks") == pytest.approx([total], abs=1e-3)


def write_pairs(directory, scores_of=None):
    """Two paradigms of one phenomenon and one without a name, in two files."""
    directory.mkdir()
    rng = np.random.default_rng(3)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "cat"]

    def sentence(length):
        return " ".join(rng.choice(words, length)) + "."

    for paradigm, phenomenon, count in (
        ("island", "movement", 9),
        ("gap", "movement", 5),
        ("number", "agreement", 4),
    ):
        with open(directory / f"{paradigm}.jsonl", "w", encoding="utf-8") as file:
            for number in range(count):
                pair = {"sentence_good": sentence(4), "sentence_bad": sentence(5), "pairID": str(number)}
                print(json.dumps({**pair, "UID": paradigm, "linguistics_term": phenomenon}), file=file)
    return directory


def test_the_command_counts_pairs_by_paradigm_and_phenomenon(imported, tmp_path):
    original, run = imported("gpt2")
    pairs = write_pairs(tmp_path / "pairs")
    checkpoints = ["--checkpoint", run, "--checkpoint", original, "--minimal-pairs", pairs]
    outputs = ["--json", tmp_path / "new/out.json", "--plot", tmp_path / "new/pictures/out.png"]
    done = forked("scripts/evaluate.py", *checkpoints, *outputs)
    assert done.returncode == 0, done.stderr
    found, exported = json.loads((tmp_path / "new/out.json").read_text()).values()
    assert found == exported and (tmp_path / "new/pictures/out.png").stat().st_size > 5000
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    model = transformers.GPT2LMHeadModel.from_pretrained(original).eval()
    accuracies = {}
    for path in sorted(pairs.iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        right = [
            left_to_right(model, tokenizer, line["sentence_good"])
            > left_to_right(model, tokenizer, line["sentence_bad"])
            for line in lines
        ]
        accuracies[path.stem] = np.mean(right)
        one = found["paradigms"][path.stem]
        assert one["accuracy"] == accuracies[path.stem] and one["pairs"] == len(lines) and one["ties"] == 0
        assert one["standard_error"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))
    assert found["accuracy"] == pytest.approx(np.mean(list(accuracies.values())))
    assert found["phenomena"]["movement"]["accuracy"] == pytest.approx(
        (accuracies["island"] + accuracies["gap"]) / 2
    )
    assert "movement" in done.stdout and f"{100 * found['accuracy']:.1f} ±" in done.stdout.splitlines()[-1]


class Constant:
    """Stands for a harness whose sentences of even length have equal scores."""

    def __init__(self):
        self.template = SimpleNamespace(
            format_name="prefix",
            check_score=lambda score: None,
            tokenize=lambda context, text: SimpleNamespace(continuation=[*text]),
        )

    def loglikelihood(self, pairs):
        return [(float(len(text) % 2) * len(text), False) for _, text in pairs]


def test_equal_scores_count_as_wrong_but_one_sentence_twice_as_right():
    pairs = [
        minimal_pairs.MinimalPair("p", "", good, bad)
        for good, bad in (("aaa", "b"), ("b", "aaa"), ("aa", "bb"), ("aaaaa", "aa"), ("aa", "aa"))
    ]
    found = minimal_pairs.measure(Constant(), pairs, "left-to-right")
    (one,) = found.paradigms
    assert one.right == [True, False, False, True, True] and (one.ties, one.same) == (1, 1)
    assert "1 pairs have equal scores" in minimal_pairs.table({"run": found})
    assert found.as_json()["paradigms"]["p"]["accuracy"] == 0.6 and list(found.phenomena()) == ["p"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sentence_good": "a", "sentence_bad": "a"}\n' * 2, "in all 2 pairs"),
        ('\n{"sentence_good": "a"}\n', r":2: there is no field sentence_bad \(fields: sentence_good\)"),
        ('{"sentence_good": "a", "sentence_bad": null}\n', ":1: sentence_bad is None"),
        (
            '{"sentence_good": "a", "sentence_bad": "b", "linguistics_term": "a\\nb"}\n',
            r"linguistics_term is 'a\\nb'",
        ),
        ('{"sentence_good": "a", "sentence_bad": "b", "UID": 3}\n', ":1: UID is 3"),
        (
            '{"sentence_good": "a", "sentence_bad": "b", "UID": "p", "linguistics_term": "t"}\n'
            '{"sentence_good": "a", "sentence_bad": "b", "UID": "p"}\n',
            ":2: the paradigm p is of '' here, and of 't' in an earlier line",
        ),
        ("[1]\n", ":1: "),
        ("", "has no pair"),
    ],
)
def test_lines_that_are_no_pairs_are_refused_by_number(tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_minimal_pairs(tmp_path / "x.jsonl")


def test_names_that_lack_match_the_file(tmp_path):
    (tmp_path / "island.jsonl").write_text('{"sentence_good": "a", "sentence_bad": "b"}\n')
    (pair,) = read_minimal_pairs(tmp_path)
    assert (pair.paradigm, pair.phenomenon) == ("island", "")
    with pytest.raises(DataError, match=r"no \.jsonl file"):
        read_minimal_pairs(tmp_path.parent / tmp_path.name / "..")


def test_compressed_files_are_read_and_hidden_ones_are_not(tmp_path):
    pair = b'{"sentence_good": "a", "sentence_bad": "b", "UID": null, "linguistics_term": null}\n'
    (tmp_path / "island.jsonl.gz").write_bytes(gzip.compress(pair))
    (tmp_path / "GAP.JSONL").write_bytes(pair)
    (tmp_path / "._gap.jsonl").write_bytes(b"\0\5\x16\7")
    assert [pair.paradigm for pair in read_minimal_pairs(tmp_path)] == ["GAP", "island"]


def test_a_path_without_pairs_is_named_as_what_it_is(tmp_path):
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "directory.jsonl").mkdir()
    for path, reason in ((tmp_path, "broken.jsonl does not exist"), (tmp_path / "x", "x does not exist")):
        with pytest.raises(DataError, match=f"{reason}; minimal pairs are"):
            read_minimal_pairs(path)
    (tmp_path / "broken.jsonl").unlink()
    with pytest.raises(DataError, match=r"directory\.jsonl is not a file; minimal pairs are"):
        read_minimal_pairs(tmp_path)


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.TSV", "train.parquet", "pairs.txt.gz"])
def test_files_of_another_format_are_named_as_such(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1\x15")
    with pytest.raises(DataError, match=f"{name} is not a file of JSON lines by its name; write it as one"):
        read_minimal_pairs(tmp_path / name)
    with pytest.raises(DataError, match=r"has no \.jsonl file; .* write others as JSON lines"):
        read_minimal_pairs(tmp_path)


def test_a_file_that_is_there_twice_does_not_count_twice(tmp_path):
    pair = b'{"sentence_good": "a", "sentence_bad": "b"}\n'
    (tmp_path / "island.jsonl").write_bytes(pair)
    (tmp_path / "island.jsonl.gz").write_bytes(gzip.compress(pair))
    with pytest.raises(
        DataError, match=r"has island\.jsonl and island\.jsonl\.gz, whose pairs would count twice"
    ):
        read_minimal_pairs(tmp_path)


def test_sentences_of_the_same_tokens_are_equal_in_any_batch(tmp_path, monkeypatch):
    """Noise stands for rounding, which depends on what else is in a batch."""
    masked, glm = (
        Harness(harness_run(tmp_path / name, name), size=3) for name in ("masked_lm", "blank_infilling")
    )
    exact, rng = Harness._score_batch, np.random.default_rng(1)

    def rounded(self, batch):
        scores, likeliest = exact(self, batch)
        return scores + rng.normal(size=scores.shape), likeliest

    monkeypatch.setattr(Harness, "_score_batch", rounded)
    # WordPiece here knows neither case nor spaces.
    texts = [("The quick fox", "the quick fox"), ("the dog  jumps", "the dog jumps"), ("ŋ cats", "ƕ cats")]
    pairs = [minimal_pairs.MinimalPair("p", "", *two) for two in (*texts, *(two[::-1] for two in texts))]
    for harness, score in ((masked, "words"), (masked, "tokens"), (glm, "blanks"), (glm, "left-to-right")):
        (found,) = minimal_pairs.measure(harness, pairs, score).paradigms
        assert found.ties == len(pairs) and not any(found.right)


def test_a_sentence_that_does_not_fit_is_found_before_any_is_scored(tmp_path, monkeypatch):
    pairs = [
        minimal_pairs.MinimalPair(name, "", text, "a") for name, text in (("p", "the"), ("q", "the " * 99))
    ]
    monkeypatch.delattr(Harness, "_score_samples")
    for objective, score in (("masked_lm", "words"), ("causal", "left-to-right"), ("t5", "left-to-right")):
        harness = Harness(harness_run(tmp_path / objective, objective))
        with pytest.raises(DataError, match=r"paradigm q: the .* has 99 tokens"):
            minimal_pairs.measure(harness, pairs, score)


def test_what_cannot_be_scored_is_refused_before_the_first_checkpoint(imported, tmp_path):
    gpt, bert = imported("gpt2")[1], imported("bert")[1]
    pairs = ["--minimal-pairs", write_pairs(tmp_path / "pairs")]
    for arguments, message in (
        (
            ["--checkpoint", gpt, "--checkpoint", bert, "--score", "left-to-right"],
            "the score is left-to-right, but",
        ),
        (["--checkpoint", gpt, "training.seed=3"], "settings of training are given, but the run"),
        (["--checkpoint", gpt, "task.stride=3"], "minimal pairs take only task.form, "),
        (["--checkpoint", gpt, "task.bidirectional=false"], "minimal pairs take only task.form, "),
        (["--checkpoint", gpt, "task.mask=gmask"], "the mask is gmask, but"),
        (["--checkpoint", gpt, "task.sequence_length=a"], "task.sequence_length"),
        (["--checkpoint", gpt, "task.sequence_length=8"], "but only 8 fit the model"),
    ):
        done = forked("scripts/evaluate.py", *arguments, *pairs)
        assert done.returncode == 2 and message in done.stderr and "measured" not in done.stdout, done.stderr


def test_each_checkpoint_is_scored_once_and_kept_when_a_later_one_fails(imported, tmp_path, monkeypatch):
    original, run = imported("gpt2")
    measure, calls = minimal_pairs.measure, []

    def failing(harness, *arguments):
        calls.append(1)
        if len(calls) > 1:
            raise DataError(f"no more of {harness.run.checkpoint.path}")
        return measure(harness, *arguments)

    monkeypatch.setattr(minimal_pairs, "measure", failing)
    checkpoints = ["--checkpoint", run, "--checkpoint", run, "--checkpoint", original]
    outputs = ["--pairs", 1, "--json", tmp_path / "result.json"]
    pairs = write_pairs(tmp_path / "pairs")
    done = forked("scripts/evaluate.py", *checkpoints, "--minimal-pairs", pairs, *outputs)
    assert "no more of" in done.stderr and str(run) not in done.stderr and done.stdout == f"measured {run}\n"
    assert list(json.loads((tmp_path / "result.json").read_text())) == [str(run)]


def test_an_export_is_asked_before_anything_is_scored_too(imported, tmp_path):
    checkpoints = ["--checkpoint", imported("gpt2")[1], "--checkpoint", imported("bert")[0]]
    pairs = ["--minimal-pairs", write_pairs(tmp_path / "pairs"), "--score", "left-to-right"]
    done = forked("scripts/evaluate.py", *checkpoints, *pairs)
    assert done.returncode == 2 and "measured" not in done.stdout and "the score is left" in done.stderr


def test_a_result_does_not_replace_the_pairs(imported, tmp_path):
    pairs = write_pairs(tmp_path / "pairs")
    given = ["--checkpoint", imported("gpt2")[1], "--minimal-pairs", pairs, "--json", pairs / "gap.jsonl"]
    before = (pairs / "gap.jsonl").read_bytes()
    done = forked("scripts/evaluate.py", *given)
    assert done.returncode == 2 and "is a file of the minimal pairs" in done.stderr
    assert (pairs / "gap.jsonl").read_bytes() == before


def test_a_score_that_the_run_does_not_give_is_refused(tmp_path):
    causal, masked, glm = (
        Harness(harness_run(tmp_path / name, name)) for name in ("causal", "masked_lm", "blank_infilling")
    )
    for harness, score in (
        (causal, "words"),
        (causal, "blanks"),
        (masked, "left-to-right"),
        (masked, "blanks"),
        (glm, "words"),
    ):
        with pytest.raises(ConfigError, match="choose that"):
            minimal_pairs.measure(harness, [], score)
    with pytest.raises(DataError, match="1 to"):
        minimal_pairs.scored(masked, ["the " * 99], "words")
    other = Harness(harness_run(tmp_path / "other", "blank_infilling"), HarnessOptions(mask="gmask"))
    with pytest.raises(ConfigError, match=r"the mask is gmask, but the blanks of words are \[MASK\]"):
        minimal_pairs.measure(other, [], "blanks")


def test_a_glm_of_long_spans_alone_is_scored_left_to_right(tmp_path):
    run = harness_run(tmp_path, "blank_infilling", token_prob=0.0, sentence_prob=0.0)
    harness = Harness(run)
    assert minimal_pairs.default_score(harness.template) == "left-to-right"
    with pytest.raises(ConfigError, match="gives left-to-right"):
        minimal_pairs.measure(harness, [], "blanks")
    assert minimal_pairs.default_score(Harness(harness_run(tmp_path, "blank_infilling")).template) == "blanks"


@pytest.mark.parametrize("paradigms", [67, 2])
def test_published_means_are_drawn_for_the_whole_benchmark_alone(tmp_path, monkeypatch, paradigms):
    from matplotlib.axes import Axes

    written = []
    monkeypatch.setattr(Axes, "annotate", lambda self, text, *_, **__: written.append(text))
    found = [minimal_pairs.Paradigm(f"p{i}", "some", [True, False]) for i in range(paradigms)]
    minimal_pairs.draw(tmp_path / "a.png", {"run": minimal_pairs.Scores("words", found)})
    assert written == (list(minimal_pairs.PUBLISHED) if paradigms == 67 else [])


def test_names_in_a_picture_are_text(tmp_path, monkeypatch):
    """matplotlib reads $ as mathematics, and leaves labels that begin with _ out of a legend."""
    from matplotlib.axes import Axes

    legends, legend = [], Axes.legend
    monkeypatch.setattr(Axes, "legend", lambda *a, **k: legends.append(legend(*a, **k)) or legends[-1])
    found = [minimal_pairs.Paradigm("p", "a$\\foo$", [True, False])]
    minimal_pairs.draw(tmp_path / "a.png", {"_run$\\foo$": minimal_pairs.Scores("words", found)})
    assert [text.get_text().strip() for text in legends[0].get_texts()] == ["_run$\\foo$ (words)"]


def test_the_first_pairs_of_each_paradigm(tmp_path):
    lines = [
        {"sentence_good": f"g{i}", "sentence_bad": f"b{i}", "UID": uid}
        for i in range(3)
        for uid in ("one", "two")
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(pair.paradigm, pair.good) for pair in read_minimal_pairs(tmp_path, 2)]
    assert found == [("one", "g0"), ("one", "g1"), ("two", "g0"), ("two", "g1")]
    assert len(read_minimal_pairs(tmp_path)) == 6
