"""Rules of the code: the direction of imports, and what tests may not do."""

from __future__ import annotations

from support import code_structure


def test_no_circular_imports():
    # An import for a type checker runs no code, so it makes no cycle.
    assert code_structure.cycles(code_structure.import_graph(with_types=False)) == []


def test_no_upward_imports_between_packages():
    assert code_structure.upward_imports(code_structure.import_graph()) == []


def test_every_module_is_in_a_package():
    outside = [code_structure.module_name(path) for path in code_structure.product_files()]
    outside = [name for name in outside if code_structure.package_index(name) is None]
    assert outside == ["data_utils", "megatron_lite", "megatron_lite.models"]


def test_the_model_imports_nothing_of_the_data_but_the_common_package():
    """Its input is fields of integers: no tokenizer, objective or task is loaded with a layer."""
    graph = code_structure.import_graph()
    others = {
        f"{name} imports {other}"
        for name in graph
        if name.startswith("megatron_lite.transformer.")
        for other in graph[name]
        if other.startswith("data_utils.") and not other.startswith("data_utils.common.")
    }
    assert others == set()


def in_tests(rule):
    """The violations of a rule, by test file."""
    results = {
        code_structure.module_name(path): rule(path.read_text(encoding="utf-8"))
        for path in code_structure.test_files()
    }
    return {name: result for name, result in results.items() if result}


def test_no_test_imports_another():
    """Shared code of tests is in tests/support."""
    assert in_tests(code_structure.imports_of_tests) == {}


def test_tests_wait_for_conditions_and_not_for_fixed_times():
    assert set(in_tests(code_structure.sleeps)) == {"tests.support.waiting"}


def test_rules_can_fail():
    """Each rule names the violation."""
    graph = {
        "data_utils.common.files": {"data_utils.corpus.documents": 3},
        "data_utils.corpus.documents": {"data_utils.common.files": 1},
    }
    assert code_structure.cycles(graph) == [["data_utils.common.files", "data_utils.corpus.documents"]]
    assert code_structure.upward_imports(graph) == [
        "data_utils.common.files:3 imports data_utils.corpus.documents"
    ]
    guarded = "if TYPE_CHECKING:\n    from a.b import c\nimport a.d\n"
    assert list(code_structure.imports_of(guarded, {"a.b", "a.d"})) == [("a.d", 3), ("a.b", 2)]
    assert list(code_structure.imports_of(guarded, {"a.b", "a.d"}, with_types=False)) == [("a.d", 3)]
    source = "from tests.train.test_a import b\nimport test_c, time\ntime.sleep(1)\nfrom time import sleep\n"
    assert code_structure.imports_of_tests(source) == ["tests.train.test_a.b", "test_c"]
    assert code_structure.sleeps(source) == [3, 4]
    assert code_structure.sleeps("Thread(target=time.sleep)\nprogram = 'time.sleep(1)'") == [1]
