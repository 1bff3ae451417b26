"""The object or the text of a JSON line, or the reason why it cannot be used."""

from __future__ import annotations

import json
from typing import Any

import orjson

from data_utils.text.stored_files import raise_if_out_of_memory

UTF8_BOM = b"\xef\xbb\xbf"
_OBJECT_REMEDY = "each object needs a line of its own: jq -c . FILE > NEW.jsonl"
_ARRAY_REMEDY = "each object needs a line of its own: jq -c '.[]' FILE > NEW.jsonl"
_NESTED_REMEDY = "fields within fields are not read: jq -c '{{text: .{}}}' FILE > NEW.jsonl"
_LARGE_RECORD_BYTES = 1 << 20
_JSON_MEMORY = 16  # memory that orjson needs per byte of JSON, at most: a buffer of 12, and 4 for the text


class UnusableRecord(Exception):
    """A record that is counted as bad, by its kind."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises UnusableRecord; MemoryError."""
    if len(line) > _LARGE_RECORD_BYTES:
        bytearray(_JSON_MEMORY * len(line))  # raises MemoryError where orjson would end the process
    try:
        tree = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise_if_out_of_memory(error)
        raise _why_not_json(line, error) from None
    if not isinstance(tree, dict):
        hint = f" ({_ARRAY_REMEDY})" if isinstance(tree, list) else ""
        raise UnusableRecord("not_an_object", f"the line holds {json_type(tree)}, not an object{hint}")
    return tree


def parse_json_line(line: bytes, text_key: str) -> str:
    """The text of a line that holds a JSON object. Raises UnusableRecord; MemoryError."""
    tree = parse_json_object(line)
    if text_key not in tree:
        fields = ", ".join(list(tree)[:10]) or "none"
        problem = (
            f"there is no field {text_key!r} (fields: {fields[:200]}; --text-key names the one with the text)"
        )
        if text_key.partition(".")[0] in tree:
            problem += f"; {_NESTED_REMEDY.format(text_key)}"
        raise UnusableRecord("missing_field", problem)
    text = tree[text_key]
    if not isinstance(text, str):
        problem = f"field {text_key!r} holds {json_type(text)}, not text"
        if isinstance(text, dict) and text:
            problem += f"; {_NESTED_REMEDY.format(f'{text_key}.{next(iter(text))}'[:80])}"
        raise UnusableRecord("field_not_text", problem)
    return text


def _why_not_json(line: bytes, error: orjson.JSONDecodeError) -> UnusableRecord:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as decode_error:
        return not_utf8(decode_error)
    if line.startswith(UTF8_BOM):
        return UnusableRecord("byte_order_mark", "a byte order mark inside the file (joined files?)")
    if "control character" in error.msg:
        return UnusableRecord("control_character", f"{error.msg} at character {error.pos + 1}")
    if b"\\u" in line:
        try:  # the standard library accepts half a surrogate pair, which no UTF-8 text can hold
            json.loads(line)
        except (ValueError, RecursionError):
            pass
        else:
            return UnusableRecord("lone_surrogate", f"half of a surrogate pair: {error.msg}")
    problem = f"malformed JSON: {error.msg} at character {error.pos + 1}"
    opening = line.strip()
    if (
        opening.startswith(b"[") or opening == b"{"
    ):  # the first line of an array, or of one object on many lines
        problem += f" ({_ARRAY_REMEDY if opening.startswith(b'[') else _OBJECT_REMEDY})"
    return UnusableRecord("malformed_json", problem)


def not_utf8(error: UnicodeDecodeError) -> UnusableRecord:
    byte = error.object[error.start]
    return UnusableRecord("invalid_utf8", f"invalid UTF-8: byte 0x{byte:02x} at position {error.start + 1}")


def json_type(value: Any) -> str:
    """The type of a JSON value, in words for messages."""
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
