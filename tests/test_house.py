"""Rules of the code: the direction of imports, and what tests may not do."""

from __future__ import annotations

from support import house


def test_no_circular_imports():
    # An import for a type checker runs no code, so it makes no cycle.
    assert house.cycles(house.import_graph(with_types=False)) == []


def test_no_upward_imports_between_packages():
    assert house.upward_imports(house.import_graph()) == []


def test_every_module_is_in_a_package():
    outside = [house.module_name(path) for path in house.product_files()]
    outside = [name for name in outside if house.package_index(name) is None]
    assert outside == ["data_utils", "megatron_lite", "megatron_lite.models"]


def test_the_model_imports_nothing_of_the_data_but_the_common_package():
    """Its input is fields of integers: no tokenizer, objective or task is loaded with a layer."""
    graph = house.import_graph()
    others = {
        f"{name} imports {other}"
        for name in graph
        if name.startswith("megatron_lite.model.")
        for other in graph[name]
        if other.startswith("data_utils.") and not other.startswith("data_utils.common.")
    }
    assert others == set()


def in_tests(rule):
    """The violations of a rule, by test file."""
    results = {house.module_name(path): rule(path.read_text(encoding="utf-8")) for path in house.test_files()}
    return {name: result for name, result in results.items() if result}


def test_no_test_imports_another():
    """Shared code of tests is in tests/support."""
    assert in_tests(house.imports_of_tests) == {}


def test_tests_wait_for_conditions_and_not_for_fixed_times():
    assert set(in_tests(house.sleeps)) == {"tests.support.waiting"}


def test_rules_can_fail():
    """Each rule names the violation."""
    graph = {
        "data_utils.common.files": {"data_utils.corpus.documents": 3},
        "data_utils.corpus.documents": {"data_utils.common.files": 1},
    }
    assert house.cycles(graph) == [["data_utils.common.files", "data_utils.corpus.documents"]]
    assert house.upward_imports(graph) == ["data_utils.common.files:3 imports data_utils.corpus.documents"]
    guarded = "if TYPE_CHECKING:\n    from a.b import c\nimport a.d\n"
    assert list(house.imports_of(guarded, {"a.b", "a.d"})) == [("a.d", 3), ("a.b", 2)]
    assert list(house.imports_of(guarded, {"a.b", "a.d"}, with_types=False)) == [("a.d", 3)]
    source = "from tests.train.test_a import b\nimport test_c, time\ntime.sleep(1)\nfrom time import sleep\n"
    assert house.imports_of_tests(source) == ["tests.train.test_a.b", "test_c"]
    assert house.sleeps(source) == [3, 4]
    assert house.sleeps("Thread(target=time.sleep)\nprogram = 'time.sleep(1)'") == [1]
