"""The rules of the house: which way imports go, how long files and functions may be, what tests may not do."""

from __future__ import annotations

from support import english, figures, house


def test_no_circular_imports():
    assert house.circles(house.import_graph()) == []


def test_no_upward_imports_between_rooms():
    assert house.upward_imports(house.import_graph()) == []


def test_every_module_is_in_a_room():
    outside = [house.module_name(path) for path in house.product_files()]
    outside = [name for name in outside if house.room_of(name) is None]
    assert outside == [
        "data_utils",
        "megatron_lite",
        "megatron_lite.hf",
        "megatron_lite.model",
        "megatron_lite.train",
    ]


def test_the_model_knows_nothing_of_data_but_the_base():
    """Its input is planes of integers: no tokenizer, objective or task is loaded with a layer."""
    graph = house.import_graph()
    others = {
        f"{name} imports {other}"
        for name in graph
        if name.startswith("megatron_lite.model.")
        for other in graph[name]
        if other.startswith("data_utils.") and not other.startswith("data_utils.base.")
    }
    assert others == set()


# New abilities and the lines of the product that each needed, to be told in docs/log.md. All else is won elsewhere.
ABILITIES: dict[str, int] = {
    "Llama, Mistral, Qwen, EuroBERT, T5 1.1, mT5, XLM-RoBERTa, CamemBERT": 255,
    "blanks of whole words": 42,
    "rotary positions in GLM's class of transformers, and two more ways of positions in spans": 68,
    "initial scales of words and of positions": 7,
    "a warning where training, scores or filled blanks stand still": 108,
    "phases, ramps, schedules in parts": 701,
    "lengths that change, regions": 442,
    "scores of whole words, a 5-gram that sees both sides, corpora of a copied run": 156,
    "a page to try a run": 598,
    "two tasks whose best possible score is known, in the quickstart": 132,
    "LAMB, StableAdamW, AdaFactor and Muon, with their checkpoints and estimates": 828,
    "averages of the weights": 137,
    "merged checkpoints": 139,
    "z-loss, reported apart, and a soft cap of the logits": 89,
    "a look inside a run: contextuality, heads, attention, features, probes": 1225,
    "muP and its check": 364,
    "a table of phases in the report": 77,
    "advice for each phase and for all of them": 47,
    "fill in the middle": 153,
    "ELECTRA: generator and discriminator, and both as directories": 912,
    "heads of tasks of ELECTRA, ModernBERT and EuroBERT, a discriminator alone": 39,
    "NeoBERT, and estimates of norms of heads": 93,
    "UL2's mixture of denoisers, with tokens of modes": 232,
    "masked diffusion, divided by tokens, and its generation": 262,
    "masked diffusion tuned on answers": 43,
    "a dry run of generator and discriminator": 65,
    "local layers": 304,
    "ModernBERT and Ettin's decoder, with the options of their body": 191,
    "GLM's class of transformers on a modern body": 29,
    "local layers in GLM's class of transformers": 33,
    "an honest roofline: tiles, waves, instructions, constants with sources": 294,
    "one kernel on GPUs for each norm, activation, gate and its dropout": 120,
    "ERNIE of Tsinghua: entities beside tokens, with fixed vectors": 748,
    "entities in corpora: read, aligned with tokens, stored, joined": 326,
    "typing with several labels, marks around mentions, entities in tasks": 487,
    "ERNIE of Tsinghua in its published layout, several labels in exports": 296,
    "CUDA graphs of blocks": 391,
    "rotary positions, norms of heads and shared keys in one kernel; modern blocks as one function": 515,
    "attention under the rule and with a bias by distance, in kernels on GPUs": 439,
    "token-document relation, sentence reordering and distance, with their heads": 397,
    "capitals of words, stored beside tokens and predicted": 120,
    "fine-tuning on several tasks at once": 379,
    "disentangled attention, and DeBERTa-v3": 340,
    "XLNet's scores from a table of queries, in kernels on GPUs, and its estimate": 171,
    "words of generator and discriminator with gradients apart": 78,
    "a discriminator whose words are a sum, tuned and as one of two directories": 23,
    "DeBERTa's heads of tasks, and its body without a head": 30,
    "lengths of micro-batches that follow from waves of tiles, and padding in records and proposals": 60,
    "disentangled attention from tables, in kernels on GPUs, and its estimate": 256,
    "logits of some rows at a time, and their time, memory and proposal": 252,
    "spans that a corpus lists, masked as one": 278,
    "RoBERTa's formats of inputs": 224,
    "short samples of every objective": 56,
    "GLM without its second position": 6,
    "corpora of labelled pairs; discourse relation and relevance": 530,
    "programs that sum over tokens by width and processors, sizes checked before launches": 77,
}
# Figures that may only fall. A change that lowers a figure lowers its number here; tests/support/figures.py prints all.
CEILINGS = {
    "lines loaded by importing planes": 68,
    "lines loaded by importing batch": 559,
    "lines loaded by importing tensor_parallel": 2418,
    "lines loaded by importing glm": 5482,
    "files of the trunk that name a system": 6,
    "lines of the product": 50942 + sum(ABILITIES.values()),
    "files over 400 lines": 7,
    "sentences that the lint of English refuses": 0,
}


def test_the_figures_of_the_house_only_fall():
    found = figures.of_the_code()
    assert found.keys() == CEILINGS.keys()
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}


def test_files_and_functions_are_short():
    files = {house.module_name(path): house.line_count(path) for path in house.product_files()}
    assert {name: count for name, count in files.items() if count > 500} == {}
    functions = {
        f"{house.module_name(path)}.{name}": count
        for path in house.product_files()
        for name, count in house.functions_of(path)
    }
    assert {name: count for name, count in functions.items() if count > 80} == {}


def in_tests(rule):
    """What a rule finds, by file of the tests."""
    results = {house.module_name(path): rule(path.read_text(encoding="utf-8")) for path in house.test_files()}
    return {name: result for name, result in results.items() if result}


def test_files_of_tests_are_short():
    assert in_tests(lambda source: source.count("\n") > 500) == {}


def test_no_test_imports_another():
    """What tests share is in tests/support."""
    assert in_tests(house.imports_of_tests) == {}


def test_tests_wait_for_conditions_and_not_for_fixed_times():
    assert set(in_tests(house.sleeps)) == {"tests.support.waiting"}


def test_rules_can_fail():
    """Each rule names what breaks it."""
    graph = {
        "data_utils.base.files": {"data_utils.text.documents": 3},
        "data_utils.text.documents": {"data_utils.base.files": 1},
    }
    assert house.circles(graph) == [["data_utils.base.files", "data_utils.text.documents"]]
    assert house.upward_imports(graph) == ["data_utils.base.files:3 imports data_utils.text.documents"]
    source = "from tests.train.test_a import b\nimport test_c, time\ntime.sleep(1)\nfrom time import sleep\n"
    assert house.imports_of_tests(source) == ["tests.train.test_a.b", "test_c"]
    assert house.sleeps(source) == [3, 4]
    assert house.sleeps("Thread(target=time.sleep)\nprogram = 'time.sleep(1)'") == [1]


def test_the_lint_of_english_can_fail():
    """Each pattern is found at its line, and plain sentences pass."""
    good = '''"""The ranks of a group. What they share follows. Of these, one writes."""

# Number of tokens.
x = "what is masked"  # of the batch
'''
    assert english.refused_in_code(good) == []
    bad = [
        '"""What a rank owns."""',
        '"""Of each rank."""',
        '"""As of `Other`."""',
        "# Of a block.",
        "x = 1  # As of the other.",
        'x = setting(1, "one token in so many")',
        'x = f"{1} in so " "many"',
        'raise ValueError(f"set {x} anew")',
        "x = 1  # samples of one's own",
    ]
    for line in bad:
        assert english.refused_in_code(f"{line}\n") == [1], line
    assert english.refused_in_code("# Tokens, one in so\n# many.\n" + good) == [1]
    assert english.refused_in_code(good + '\n\ndef f():\n    """Good.\n\n    Begin anew.\n    """\n') == [10]
    assert english.refused_in_page("Begin\nanew, with so\nmany.\n") == [2, 2]


def test_the_lint_of_english_reads_code_and_pages():
    names = {path.relative_to(house.ROOT).as_posix() for path in english.pages()}
    assert {"README.md", "CONTRIBUTING.md", "docs/log.md"} <= names
    assert not names & {"docs/settings.md", "CHANGELOG.md"}
