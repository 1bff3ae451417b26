"""The sentences that the product shows are in tests/golden/messages.txt, which a reviewer reads as a diff."""

import difflib

from support import messages


def test_the_list_of_messages_is_up_to_date():
    written = messages.LIST.read_text(encoding="utf-8").splitlines()
    changes = [
        line
        for line in difflib.unified_diff(written, messages.listed().splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    remedy = "read them, then run: PYTHONPATH=.:tests python -m support.messages --write"
    assert not changes, "\n".join([f"{len(changes)} messages differ from the list; {remedy}", *changes])


def test_a_sentence_is_listed_with_its_expressions():
    source = '"""No message, a docstring."""\nraise Error(f"steps is {self.steps:,}; it must be {x!r} or " "more.")'
    assert messages.sentences(source) == ["steps is {self.steps}; it must be {x} or more."]
