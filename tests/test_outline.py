"""Outlines: the parts that are left out come back byte for byte, or nothing is left out."""

from __future__ import annotations

import ast

import libcst
import pytest

from vllm_eagle3_patch.codemod.outline import Outline, outline

LAYOUTS = {
    "as it is": str.encode,
    "tabs": lambda source: source.replace("    ", "\t").encode(),
    "CRLF": lambda source: source.replace("\n", "\r\n").encode(),
    "no newline at the end": lambda source: source.rstrip("\n").encode(),
    "byte order mark": lambda source: b"\xef\xbb\xbf" + source.encode(),
    "UTF-8 beyond ASCII": lambda source: f"# 残差\n{source}".encode(),
}

SOURCE = '''
"""A module."""
import a

LIMIT = {
    "x": 1,
}

# about f
@decorated
@decorated(
    twice=True,
)
def f(x: int = 1) -> None:
    """What it does.

Less indented than the function.
    """
    def nested():
        return """
def not_one():
    pass
"""
    return nested  # done
    # the last line of f

async def g(
    self,
    *args: int,  # noqa: E501
) -> "dict[str, int]":  # why
    # first a comment

    await h()


def one_line(): return 1


class First(Base):
    # about what follows
    def __init__(self):
        self.x = 1

    y: int = 2

    @property
    def wanted(self):
        if self.x:
            return 1

        return 2

    # between two methods

    def other(self): ...

    async def another(self):
        async with self.x:
            pass
# at the margin
        return 3

    class Inner:
        def wanted(self):
            return 4


class Second:
    """Has none."""

    def other(self):
        return 5


if LIMIT:
    def under_a_condition():
        return 6
else:
    under_a_condition = None
last = 7
'''


def outlined(content: bytes, *looked_into: str) -> Outline:
    found = outline(content, looked_into)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "looked_into", [(), ("f",), ("wanted",), ("First.wanted",), ("g", "Second.other"), ("absent",)]
)
def test_what_is_left_is_python_and_the_rest_comes_back(
    layout: str, looked_into: tuple[str, ...]
) -> None:
    content = LAYOUTS[layout](SOURCE)
    ast.parse(content)
    small = outlined(content, *looked_into)
    assert len(small.content) < len(content)
    assert small.restored(small.content) == content
    ast.parse(small.content)
    tree = libcst.parse_module(small.content)
    assert small.restored(tree.bytes) == content


def test_what_is_looked_into_is_whole_and_what_holds_it_has_its_head() -> None:
    small = outlined(SOURCE.encode(), "First.wanted").content.decode()
    assert "class First(Base):\n    # about what follows\n    def __init__(self):\n" in small
    assert "    @property\n    def wanted(self):\n        if self.x:\n" in small
    assert "    y: int = 2\n" in small
    for left_out in ("self.x = 1", "class Second", "def other(self):\n", "await", "return 3"):
        assert left_out not in small
    assert "# about f\n_" in small
    assert "LIMIT = {" in small


def test_a_function_is_named_with_its_class_or_without() -> None:
    content = b"class A:\n    x = 1\n    def f(self):\n        return 1\n"
    content += content.replace(b"class A", b"class B") + b"def f():\n    return 1\n"
    assert outlined(content, "f").left_out == ()
    assert outlined(content, "A.f").content.count(b"return 1") == 1
    assert outlined(content, "C.f").content.count(b"return 1") == 0


def test_an_edit_beside_what_was_left_out_is_kept() -> None:
    small = outlined(SOURCE.encode(), "First.wanted")
    changed = small.content.replace(b"return 2", b"return 3").replace(b"last", b"first")
    expected = SOURCE.encode().replace(b"return 2", b"return 3").replace(b"last = 7", b"first = 7")
    # Both words are elsewhere in what was left out, and stay there.
    assert small.restored(changed) == expected


@pytest.mark.parametrize("lose", [0, 1])
def test_a_part_that_is_lost_or_moved_is_noticed(lose: int) -> None:
    small = outlined(b"def f():\n    return 1\nx = 1\ndef g():\n    return 2\n")
    names = [line for line in small.content.splitlines() if line.startswith(b"_")]
    assert len(names) == 2
    assert small.restored(small.content.replace(names[lose], b"")) is None
    assert small.restored(small.content.replace(names[lose], names[lose] * 2)) is None
    assert small.restored(b"\n".join(reversed(names))) is None


def test_comments_between_definitions_are_passed_quickly() -> None:
    rule = b"# " * 60
    content = b"def f():\n    return 1\n%s\nx = 1\ndef g():\n    return 2\n" % rule
    assert outlined(content).restored(outlined(content).content) == content


def test_a_file_with_names_like_ours_is_declined() -> None:
    (name,) = outlined(b"def f():\n    return 1\n").content.splitlines()
    assert outline(b"%s = 1\ndef f():\n    return 1\n" % name, ()) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x = 1\n",
        b"def f(): return 1\n",
        b"def f(): ...\ndef g(): ...\n",
        b"def f(\n",
        b"def f():\n",
        b"def f():\nreturn 1\n",
        b"def f():\n    return '''\n",
        b"@d\n",
        b"@d\nx\n",
        b"def f():\r    return 1\r",
    ],
)
def test_nothing_is_left_out_where_nothing_is_found(content: bytes) -> None:
    assert outlined(content) == Outline(content, ())
