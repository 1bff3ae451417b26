"""The rules of the house: which way imports go, and how long files and functions may be."""

from __future__ import annotations

from support import house


def test_no_circular_imports():
    assert house.circles(house.import_graph()) == []


def test_no_upward_imports_between_rooms():
    assert house.upward_imports(house.import_graph()) == []


def test_every_module_is_in_a_room():
    outside = [house.module_name(path) for path in house.product_files()]
    outside = [name for name in outside if house.room_of(name) is None]
    assert outside == ["data_utils", "megatron_lite"]


def test_files_and_functions_are_short():
    files = {house.module_name(path): house.line_count(path) for path in house.product_files()}
    assert {name: count for name, count in files.items() if count > 500} == {}
    functions = {
        f"{house.module_name(path)}.{name}": count
        for path in house.product_files()
        for name, count in house.functions_of(path)
    }
    assert {name: count for name, count in functions.items() if count > 80} == {}


def test_rules_can_fail():
    """A circle and an upward import are found where there are some."""
    graph = {
        "data_utils.base.files": {"data_utils.text.documents": 3},
        "data_utils.text.documents": {"data_utils.base.files": 1},
    }
    assert house.circles(graph) == [["data_utils.base.files", "data_utils.text.documents"]]
    assert house.upward_imports(graph) == ["data_utils.base.files:3 imports data_utils.text.documents"]
