"""The configuration machinery on a small tree of its own: types, strictness, merging, round trip."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml, one_line, setting_lines
from data_utils.common.settings import (
    REQUIRED,
    SettingsError,
    build,
    checked,
    fraction,
    inline_sections,
    merge,
    nest,
    parse_override,
    section,
    setting,
    setting_mapping,
    setting_names,
    to_tree,
    to_yaml_scalar,
)
from data_utils.common.settings_listed import describe
from data_utils.common.untrusted import load_json


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str = setting(REQUIRED, "what it is called")
    weight: float = setting(1.0, "how much it counts")


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int = setting(3, "how many")
    ratio: float = setting(0.5, "how much")
    label: str | None = setting(None, "what it says")


@dataclass(frozen=True, kw_only=True)
class Outer:
    size: int = setting(REQUIRED, "how large, tokens")
    flag: bool = setting(False, "whether")
    inner: Inner = section(Inner)
    maybe: Inner | None = setting(None, "perhaps another")
    items: tuple[Item, ...] = setting((), "some items")
    extra: dict[str, Any] = setting_mapping("anything")


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))  # a setting has no NUL
WHOLE = st.integers(-(2**63), 2**63 - 1)
SOME_INNER = st.builds(
    Inner,
    count=WHOLE,
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    label=st.none() | TEXT,
)
SOME_ITEM = st.builds(Item, name=TEXT, weight=st.floats(allow_nan=False, allow_infinity=False))
SOME_OUTER = st.builds(
    Outer,
    size=WHOLE,
    flag=st.booleans(),
    inner=SOME_INNER,
    maybe=st.none() | SOME_INNER,
    items=st.lists(SOME_ITEM, max_size=3).map(tuple),
    extra=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans(), max_size=3),
)


@given(SOME_OUTER)
def test_a_section_survives_yaml_exactly(outer):
    assert build(Outer, yaml.safe_load(yaml.safe_dump(to_tree(outer)))) == outer


@given(
    st.recursive(
        st.integers(), lambda children: st.dictionaries(st.sampled_from("abc"), children, max_size=3)
    ).filter(lambda tree: isinstance(tree, dict))
)
def test_merging_a_tree_with_itself_or_nothing_changes_nothing(tree):
    assert merge(tree, tree) == merge(tree, {}) == merge({}, tree) == tree


def test_merge_goes_key_by_key_and_replaces_lists():
    base = {"inner": {"count": 1, "ratio": 0.1}, "items": [{"name": "a"}]}
    over = {"inner": {"count": 2}, "items": [{"name": "b"}]}
    assert merge(base, over) == {"inner": {"count": 2, "ratio": 0.1}, "items": [{"name": "b"}]}
    assert base["inner"]["count"] == 1  # the arguments stay as they were


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("size=4", {"size": 4}),
        ("inner.label=", {"inner": {"label": None}}),
        ("inner.label=null", {"inner": {"label": None}}),
        ("inner.label=a=b", {"inner": {"label": "a=b"}}),
        ("items=[{name: a, weight: 2}]", {"items": [{"name": "a", "weight": 2}]}),
        ("extra.zero_optimization.stage=1", {"extra": {"zero_optimization": {"stage": 1}}}),
    ],
)
def test_an_override_is_a_dotted_key_and_a_yaml_value(text, tree):
    assert parse_override(text) == tree


@pytest.mark.parametrize("text", ["size", "=4", "size=[", "size={a: 1, a: 2}"])
def test_a_malformed_override_is_named(text):
    with pytest.raises(ConfigError) as error:
        parse_override(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("size", 5.0, 5),
        ("size", "2e3", 2000),  # YAML 1.1 reads an exponent without a dot as text
        ("inner.ratio", "1e-4", 1e-4),
        ("inner.ratio", "-.5", -0.5),
        ("inner.ratio", 1, 1.0),
        ("flag", True, True),
        ("inner.label", None, None),
        ("maybe", {}, Inner()),
        ("items", [], ()),
    ],
)
def test_values_that_mean_the_right_type_are_taken(key, value, expected):
    outer = build(Outer, merge({"size": 1}, nest(key, value)))
    result = outer
    for part in key.split("."):
        result = getattr(result, part)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("size", 1.5, "size is 1.5; it must be a valid integer"),
        ("size", True, "size is True; it must be a valid integer"),
        ("size", None, "size is None; it must be a valid integer"),
        ("size", 10**400, "; it must be less than 9223372036854775808."),
        ("inner.label", "a\0b", r"inner.label is 'a\x00b'; it must be text without NUL"),
        ("size", "12", "size is '12'; it must be a valid integer"),
        ("size", "1e-3", "size is 0.001; it must be a valid integer"),
        ("size", float("inf"), "size is inf; it must be a valid integer"),
        ("inner.ratio", float("nan"), "inner.ratio is nan; it must be a finite number"),
        ("inner.ratio", "1e999", "inner.ratio is inf; it must be a finite number"),
        ("inner.ratio", 10**400, "; it must be a valid number"),
        ("inner.ratio", "much", "inner.ratio is 'much'; it must be a valid number"),
        ("inner.ratio", False, "inner.ratio is False; it must be a valid number"),
        ("flag", 1, "flag is 1; it must be true or false"),
        ("flag", "maybe", "flag is 'maybe'; it must be true or false"),
        ("inner.label", 5, "inner.label is 5; it must be a valid string, or null; put quotes around it"),
        ("inner", None, "inner is None; it must be a section"),
        ("inner", [1], "inner is [1]; it must be a section"),
        ("items", 5, "items is 5; it must be a list"),
        ("items", "ab", "items is 'ab'; it must be a list"),
        ("items", ["ab"], "items[0] is 'ab'; it must be a section; write "),
        ("items", {"name": "a"}, "items is {'name': 'a'}; it must be a list; write "),
        ("items", [{"name": "a", "inner": {}}], "items[0].inner; the nearest valid key is inner."),
        ("items", [{}], "items[0].name is required (what it is called); set it in a file"),
        ("items", [{"name": "a", "wieght": 1}], "items[0].wieght; the nearest valid key is items[0].weight"),
        ("extra", None, "extra is None; it must be a mapping"),
        ("inner.cuont", 1, "unknown setting inner.cuont; the nearest valid key is inner.count."),
        ("count", 1, "unknown setting count; the nearest valid key is inner.count."),
        ("inner.size", 1, "unknown setting inner.size; the nearest valid key is size."),
        ("zzz", 1, "unknown setting zzz; valid keys here are extra, flag, inner, items, maybe, size."),
    ],
)  # fmt: skip
def test_a_wrong_value_or_key_is_named_with_the_rule(key, value, rule):
    with pytest.raises(ConfigError) as error:
        build(Outer, merge({"size": 1}, nest(key, value)))
    assert rule in str(error.value)


def test_a_missing_key_is_named_with_its_meaning():
    with pytest.raises(ConfigError, match=r"size is required \(how large, tokens\).* as size=VALUE"):
        build(Outer, {})


@dataclass(frozen=True, kw_only=True)
class Strict:
    outer: Outer = setting(REQUIRED, "must be there")


def test_a_missing_section_asks_for_the_key_that_has_no_default():
    with pytest.raises(ConfigError, match=r"outer\.size is required"):
        build(Strict, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"size: 1\ninner: {count: 1, count: 2}", "key 'count' appears twice"),
        (b"size: 1\nflag: true\nsize: 2", "key 'size' appears twice"),
        (b"size: [", "not valid YAML"),
        (b"!!python/object/apply:os.getcwd []", "not valid YAML"),
        (b"- 1", "must hold a mapping of sections, not list"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("inner:\n\tcount: 1\n", 2, "the line is indented by a tab; YAML takes only spaces"),
        ("size: 1\n\ninner:\n  count: 010\n", 4, "010 is 8 to some readers of YAML and 10 to others"),
        ("inner: {count: 1\nsize: 2\n", 2, r"flow mapping that begins in line 1\), in 'size: 2'"),
        ("inner:\n  label: a: b\n", 2, "mapping values are not allowed here, in 'label: a: b'"),
        ("size: 1\nflag: true\nsize: 2\n", 3, "key 'size' appears twice in one mapping; keep one"),
        ("size: 1\nextra: *a\n", 2, "undefined alias 'a'"),
    ],
)
def test_what_is_no_yaml_is_named_with_file_and_line(tmp_path, text, line, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_yaml(path)
    assert f"{path}:{line} is not valid YAML: " in str(error.value) and "\n" not in str(error.value)


def test_the_lines_of_a_file_match_its_keys(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text("# a comment\nsize: 1\ninner:\n  count: 2\nitems:\n- name: a\n  weight: 1\n- {name: b}\n")
    lines = {"size": 2, "inner": 3, "inner.count": 4, "items": 5, "items[0]": 6, "items[0].name": 6}
    assert setting_lines(path) == lines | {"items[0].weight": 7, "items[1]": 8, "items[1].name": 8}


def test_all_wrong_settings_are_named_at_once():
    tree = {"size": "x", "flag": 3, "inner": {"count": "y"}, "items": [{"name": 5, "weight": "z"}], "zzz": 1}
    with pytest.raises(SettingsError) as error:
        build(Outer, tree)
    wrong = {"size", "flag", "inner.count", "items[0].name", "items[0].weight", "zzz"}
    assert error.value.problems.keys() == wrong and error.value.rest == ""
    assert all(f"{key} " in str(error.value) or f"{key};" in str(error.value) for key in wrong)


def test_all_missing_settings_are_named_at_once_with_the_wrong_ones():
    with pytest.raises(SettingsError) as error:
        build(Strict, {"outer": {"flag": 3, "items": [{"weight": 1.0}, {"wieght": 2.0, "name": "b"}]}})
    missing, wrong = {"outer.size", "outer.items[0].name"}, {"outer.flag", "outer.items[1].wieght"}
    assert error.value.problems.keys() == missing | wrong and error.value.rest == ""
    assert all("is required" in error.value.problems[key] for key in missing)
    with pytest.raises(SettingsError) as error:
        build(Outer, {"inner": {"count": "x"}, "sizes": 1})
    assert error.value.problems.keys() == {"inner.count", "sizes", "size"}


def test_a_key_with_dots_in_a_file_is_to_be_nested():
    with pytest.raises(
        ConfigError, match=r"unknown setting inner\.count: in a file write inner: \{count: 3\}\."
    ):
        build(Outer, {"size": 1, "inner.count": 3})


def test_a_pipe_of_the_shell_is_read_and_another_is_not_waited_for(tmp_path):
    """`--config <(command)` names /dev/fd/N."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"size: 3")
        os.close(writer)
        assert load_yaml(f"/dev/fd/{reader}") == {"size": 3}
    finally:
        os.close(reader)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo is not a regular file; check the path"):
        load_yaml(tmp_path / "fifo")


def test_the_message_of_a_library_is_one_printable_line():
    error = ValueError("token \x03 of\n  " + "\u202e\ud800" + "é" * 1000)
    said = one_line(error, 100)
    assert said.startswith("token \\x03 of \\u202e\\ud800é") and said.isprintable() and len(said) < 130
    assert one_line(KeyError()) == "KeyError"


def test_a_number_too_long_to_print_is_refused():
    with pytest.raises(ConfigError, match="is a number of thousands of digits; it must be less than"):
        build(Outer, {"size": 1 << (1 << 20)})


def bomb(levels=9, width=9):
    """Aliases of aliases: width**levels values in a few lines."""
    rows = ["l0: &l0 [" + ", ".join(["lol"] * width) + "]"]
    rows += [f"l{i}: &l{i} [" + ", ".join([f"*l{i - 1}"] * width) + "]" for i in range(1, levels)]
    return "\n".join(rows)


def merge_bomb(levels=30):
    rows = ["l0: &l0 {a: 1}"] + [f"l{i}: &l{i} {{<<: [*l{i - 1}, *l{i - 1}]}}" for i in range(1, levels)]
    return "\n".join(rows)


HOSTILE = {
    "alias bomb": (bomb(), "more than 10 aliases"),
    "merge bomb": (merge_bomb(), "more than 10 aliases"),
    "list in itself": ("size: &a [*a]", "alias *a holds itself"),
    "mapping in itself": ("size: &a {b: *a}", "alias *a holds itself"),
    "merged into itself": ("size: &a {<<: *a}", "alias *a holds itself"),
    "deep list": ("size: " + "[" * 50_000, "more than 20 levels"),
    "deep mapping": ("size: " + "{a: " * 50_000, "more than 20 levels"),
    "long number": ("size: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
    "impossible date": ("size: 2001-99-99", "size is '2001-99-99'; it must be a valid integer"),
    "long value": ("size: '" + "long " * 200_000 + "'", "size is 'long long"),
    "long key": ("size: 1\n" + "k" * 900 + ": 1", "unknown setting kkkkk"),
    "key of several lines": ('size: 1\n"a\\nb": 1', r"unknown setting 'a\nb'"),
    "large file": ("# " + "x" * (1 << 20), "is longer than 1048576 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_short_line(tmp_path, name):
    text, message = HOSTILE[name]
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        build(Outer, load_yaml(path))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("12:30:45", "12:30:45"), ("1:30.5", "1:30.5"), ("2024-01-01", "2024-01-01"), ("on", "on"),
        ("No", "No"), ("08", "08"), ("'0100'", "0100"), ("true", True), ("null", None), ("1_000", 1000), ("0x1F", 31),
        ("0", 0), ("-3", -3), ("1.5e+3", 1500.0), (".5", 0.5), ("0.10", 0.1),
    ],
)  # fmt: skip
def test_plain_words_match_yaml_1_2(tmp_path, text, value):
    """1.1 reads 90 for 1:30, a date, and true for on."""
    (tmp_path / "a.yaml").write_text(f"x: {text}\n")
    tree = load_yaml(tmp_path / "a.yaml")
    assert tree == parse_override(f"x={text}") == {"x": value} and type(tree["x"]) is type(value)


@pytest.mark.parametrize("text", ["0100", "-012", "0_7", "00"])
def test_a_number_that_two_readers_read_differently_is_refused(tmp_path, text):
    (tmp_path / "a.yaml").write_text(f"x: [1, {text}]\n")
    for read in (lambda: load_yaml(tmp_path / "a.yaml"), lambda: parse_override(f"x={text}")):
        with pytest.raises(
            ConfigError, match=rf"{text} is .* to some readers of YAML and .* to others; write"
        ):
            read()


@pytest.mark.parametrize(
    ("key", "word", "value"),
    [("flag", "yes", True), ("flag", "Off", False), ("flag", "NO", False), ("inner.label", "no", "no"),
     ("inner.label", "2024-01-01", "2024-01-01"), ("inner.label", "1:30", "1:30")],
)  # fmt: skip
def test_a_switch_may_be_yes_or_no_and_text_may_be_too(key, word, value):
    outer = build(Outer, merge({"size": 1}, parse_override(f"{key}={word}")))
    for part in key.split("."):
        outer = getattr(outer, part)
    assert outer == value and type(outer) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("runs/a #1", "runs/a #1"), ("#1", "#1"), ("5 # five", "5 # five"), ("a#b", "a#b"), ("'a #b'", "a #b")],
)
def test_an_override_has_no_comment(text, value):
    assert parse_override(f"inner.label={text}") == {"inner": {"label": value}}


@pytest.mark.parametrize("text", ["[1, 2] # two", "{a: 1} #", "'x' # y"])
def test_an_override_with_a_comment_behind_more_than_a_word_is_refused(text):
    with pytest.raises(ConfigError, match=r"would be a comment.*quote it"):
        parse_override(f"items={text}")


@pytest.mark.parametrize("text", ["&a b", "---", "--- b", "b\n...", "%a b"])
def test_an_override_loses_no_sign(text):
    with pytest.raises(ConfigError, match="quote it"):
        parse_override(f"inner.label={text}")
    assert parse_override("items=[&a {name: b}, *a]") == {"items": [{"name": "b"}] * 2}


HOSTILE_OVERRIDES = {
    "deep": "size=" + "[" * 1500,  # beyond the recursion limit
    "in itself": "size=&a [*a]",
    "deep key": "a." * 50_000 + "b=1",
    "long number": "inner.label=" + "9" * 5000,
    "no key": "=" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE_OVERRIDES)
def test_a_hostile_override_is_one_short_line(name):
    with pytest.raises(ConfigError) as error:
        build(Outer, parse_override(HOSTILE_OVERRIDES[name]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


HOSTILE_JSON = {
    "deep": ('{"a": ' * 50_000, "nested deeper than 40 levels"),
    "rather deep": ('{"a": ' * 50 + "1" + "}" * 50, "nested deeper than 40 levels"),
    "repeated": ('{"a": 1, "a": 2}', "key 'a' appears twice"),
    "long number": ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    "large": (" " * (1 << 20) + "{}", "longer than 1048576 bytes"),
    "list": ("[]", "must hold a JSON object, not list"),
}


@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_a_hostile_json_file_is_one_short_line(tmp_path, name):
    text, message = HOSTILE_JSON[name]
    path = tmp_path / "hostile.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_json(path, "DeepSpeed configuration")
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 700


def test_missing_files_directories_and_empty_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load_yaml(tmp_path)
    (tmp_path / "empty.yaml").write_text("# only a comment\n")
    assert load_yaml(tmp_path / "empty.yaml") == {}


def test_yaml_merge_keys_may_repeat_what_they_override(tmp_path):
    path = tmp_path / "anchors.yaml"
    path.write_text("base: &base {count: 1, ratio: 0.2}\ninner: {<<: *base, count: 2}\n")
    assert load_yaml(path)["inner"] == {"count": 2, "ratio": 0.2}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("ranged")
class Ranged:
    count: int = setting(1, "at least", at_least=1)
    share: float = fraction(0.5, "a part")
    open: float = setting(0.5, "between", above=0, below=1)
    room: int | None = setting(None, "at most", at_most=9)
    kind: str = setting("a", "which", one_of=("a", "b"))

    def __post_init__(self) -> None:
        if self.count == 3:
            raise ConfigError("its own check")


@dataclass(frozen=True, kw_only=True)
class WithRanged:
    parts: tuple[Ranged, ...] = setting((), "some")


OUT_OF_RANGE = [
    ("count", 0, "ranged.count is 0; it must be at least 1; the default is 1."),
    ("share", 1.5, "ranged.share is 1.5; it must be at least 0 and at most 1; the default is 0.5."),
    ("share", float("nan"), "ranged.share is nan; it must be a finite number"),
    ("open", 0.0, "ranged.open is 0.0; it must be above 0 and below 1"),
    ("open", 1.0, "ranged.open is 1.0; it must be above 0 and below 1"),
    ("room", 10, "ranged.room is 10; it must be at most 9, or null."),
    ("kind", "c", "ranged.kind is 'c'; it must be one of a, b; the default is a."),
]


@pytest.mark.parametrize(("key", "value", "message"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_however_the_section_is_made(key, value, message):
    with pytest.raises(ConfigError) as error:
        Ranged(**{key: value})
    assert message in str(error.value)
    with pytest.raises(ConfigError) as error:
        replace(Ranged(), **{key: value})
    assert message in str(error.value)
    if value == value:  # NaN is refused as such when it is read
        with pytest.raises(ConfigError, match=rf"^parts\[1\]\.{key} is "):
            build(WithRanged, {"parts": [{}, {key: value}]})


def test_the_ends_of_a_range_and_a_sections_own_checks():
    assert Ranged(count=1, share=0, room=9, kind="b") and Ranged(share=1, room=None)
    with pytest.raises(ConfigError, match="its own check"):
        Ranged(count=3)


def test_every_setting_is_described_with_type_default_and_help():
    text = "\n".join(describe(Outer))
    assert list(setting_names(Outer)) == [
        "size", "flag", "inner.count", "inner.ratio", "inner.label", "maybe.count", "maybe.ratio",
        "maybe.label", "items", "extra",
    ]  # fmt: skip
    for name in setting_names(Outer):
        assert f"  {name} (" in text or name.startswith("maybe.")
    assert "  maybe (section like inner, default null)" in text
    assert "count (int, at least 1, default 1)" in "\n".join(describe(Ranged))
    assert "room (int | null, at most 9, default null)" in "\n".join(describe(Ranged))
    assert "size (int, required)\n      how large, tokens" in text
    assert "inner.label (str | null, default null)" in text
    assert "items (list of {name, weight}, default [])" in text


@given(st.integers() | st.booleans() | st.none() | st.text())
def test_a_printed_default_can_be_pasted_as_an_override(value):
    assert parse_override(f"inner.label={to_yaml_scalar(value)}") == {"inner": {"label": value}}


@dataclass(frozen=True, kw_only=True)
class WithInline:
    size: int = setting(REQUIRED, "how large, tokens")
    parts: dict[str, Inner] = inline_sections(("left", "right"), lambda name: Inner)


def test_inline_sections_are_keys_beside_their_field():
    made = build(WithInline, {"size": 1, "right": {"count": 5}})
    assert made.parts == {"right": Inner(count=5)}
    assert list(to_tree(made)) == ["size", "right"]
    assert build(WithInline, to_tree(made)) == made
    assert [name for name in setting_names(WithInline) if "count" in name] == ["left.count", "right.count"]
    assert "  left.count (int, default 3)" in describe(WithInline)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"parts": {"left": {}}}, "unknown setting parts; valid keys here are left, right, size"),
        ({"rigth": {}}, "unknown setting rigth; the nearest valid key is right"),
        ({"left": {"cuont": 1}}, "unknown setting left.cuont; the nearest valid key is left.count"),
        ({"left": 3}, "left is 3; it must be a section"),
        ({"left": {}}, "size is required"),
    ],
)
def test_mistakes_in_inline_sections(tree, message):
    with pytest.raises(ConfigError, match=message):
        build(WithInline, tree)


def test_an_inline_section_has_no_name_of_another_key():
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        size: int = setting(1, "how large, tokens")
        parts: dict[str, Inner] = inline_sections(("size",), lambda name: Inner)

    with pytest.raises(AssertionError, match=r"Twice has the keys \{'size'\} twice"):
        build(Twice, {})


def test_an_empty_mapping_replaces_what_files_set():
    """Otherwise an override could add to a mapping, but take nothing away."""
    tree = {"objectives": {"blank_infilling": 1}, "inner": {"a": 1, "b": 2}, "other": {"c": 3}}
    for text in ("objectives={}", "objectives.masked_lm=1", "inner={a: 5}", "other={}"):
        tree = merge(tree, parse_override(text))
    assert tree == {"objectives": {"masked_lm": 1}, "inner": {"a": 5, "b": 2}, "other": {}}
    given = {}
    for text in ("x.objectives={}", "x.objectives.masked_lm=1"):
        given = merge(given, parse_override(text))
    assert merge({"x": {"objectives": {"old": 1}, "y": 2}}, given) == {
        "x": {"objectives": {"masked_lm": 1}, "y": 2}
    }
