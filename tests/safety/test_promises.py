"""SECURITY.md: each promise names tests that are there."""

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises() -> list[str]:
    text = (PROJECT / "SECURITY.md").read_text("utf-8")
    section = text.partition("## Promises")[2].partition("\n## ")[0]
    return re.split(r"\n(?=\d+\. \*\*)", section)[1:]


def test_each_promise_names_a_test() -> None:
    found = promises()
    assert len(found) > 10
    for promise in found:
        assert TEST.search(promise), promise


def test_the_tests_that_are_named_are_there() -> None:
    for path, name in TEST.findall((PROJECT / "SECURITY.md").read_text("utf-8")):
        module = ast.parse((PROJECT / path).read_bytes())
        assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
