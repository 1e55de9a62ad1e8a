"""The helpers that every codemod is written with, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import libcst as cst
import pytest
from libcst import matchers as m
from libcst.codemod import CodemodContext

from vllm_eagle3_patch.codemod.anchored import (
    AnchoredCodemod,
    appended,
    assigns,
    matching,
    self_attribute,
)
from vllm_eagle3_patch.ground.errors import AnchorNotFoundError
from vllm_eagle3_patch.ground.family import FAMILY

if TYPE_CHECKING:
    from collections.abc import Callable

    Edit = Callable[["Edited", cst.Module], None]

MARKER = "# vllm-eagle3-patch: a-patch\n"


class Edited(AnchoredCodemod):
    """The edits of one test."""

    patch: ClassVar[str] = "a-patch"

    def __init__(self, edit: Edit, filename: str | None = None) -> None:
        super().__init__(CodemodContext(filename=filename))
        self._edit_of_the_test = edit

    def edit(self, module: cst.Module) -> None:
        self._edit_of_the_test(self, module)


def edited(source: str, edit: Edit) -> str:
    return Edited(edit).transform_module(cst.parse_module(source)).code


# Anchors


def test_a_codemod_without_edits_changes_nothing() -> None:
    assert edited("x = 1 ;y=2  # z\n", lambda codemod, module: None) == "x = 1 ;y=2  # z\n"


def test_a_codemod_is_about_the_family_unless_told_otherwise() -> None:
    assert Edited(lambda codemod, module: None).models == FAMILY


def test_an_anchor_found_once_is_that_node() -> None:
    node = cst.Name("x")
    assert Edited(lambda codemod, module: None).only([node], "x", "f") is node


@pytest.mark.parametrize("count", [0, 2])
def test_an_anchor_not_found_once_is_an_error_that_names_it(count: int) -> None:
    codemod = Edited(lambda codemod, module: None, "vllm/a.py")
    with pytest.raises(AnchorNotFoundError) as caught:
        codemod.only([cst.Name("x")] * count, "the loop", "Model.forward")
    error = caught.value
    assert error.message == (
        f"vllm/a.py: the loop in Model.forward: expected once, found {count} times (patch a-patch)"
    )
    assert error.code == "anchor-missing"


def test_an_anchor_in_a_source_without_a_name() -> None:
    with pytest.raises(AnchorNotFoundError, match="<source>"):
        edited("", lambda codemod, module: codemod.only_class(module, "A") and None)


def test_the_only_class_is_one_of_the_module() -> None:
    module = cst.parse_module("def f():\n    class A: pass\nclass A:\n    def g(self): pass\n")
    codemod = Edited(lambda codemod, module: None)
    found = codemod.only_class(module, "A")
    assert found is module.body[1]
    assert codemod.only_method(found, "g").name.value == "g"
    with pytest.raises(AnchorNotFoundError) as caught:
        codemod.only_method(found, "f")
    assert (caught.value.anchor, caught.value.where) == ("def f", "A")


# Edits


def test_two_edits_of_one_node_are_made_in_order() -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        name = cst.ensure_type(module.body[0], cst.ClassDef).name
        codemod.change(name, lambda node: node.with_changes(value=f"{node.value}1"))
        codemod.change(name, lambda node: node.with_changes(value=f"{node.value}2"))

    assert edited("class A: pass\n", edit) == "class A12: pass\n"


def test_an_edit_of_a_class_keeps_the_edits_inside_it() -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        owner = codemod.only_class(module, "A")
        codemod.add_base(owner, "C")
        codemod.insert_after(owner.body.body[0], codemod.statements(module, "y = 2"))

    assert edited("class A(B):\n    x = 1\n", edit) == (
        f"class A(B, C):\n    x = 1\n    {MARKER}    y = 2\n"
    )


# Inserted statements


def test_statements_carry_one_marker_above_their_comments() -> None:
    source = """
    # why
    if a:

        b()

    c()
    """

    def edit(codemod: Edited, module: cst.Module) -> None:
        function = cst.ensure_type(module.body[0], cst.FunctionDef)
        codemod.insert_after(function.body.body[0], codemod.statements(module, source))

    assert edited("def f():\n  x = 1\n  return x\n", edit) == (
        f"def f():\n  x = 1\n  {MARKER}  # why\n  if a:\n\n    b()\n\n  c()\n  return x\n"
    )


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("", f"{MARKER}b\n"),
        ("\n", f"\n{MARKER}b\n"),
        ("# c\n", f"{MARKER}b\n# c\n"),
        ("\n\n# c\n\n# d\n", f"\n\n{MARKER}b\n# c\n\n# d\n"),
    ],
    ids=["nothing above", "a blank line", "a comment", "blank lines and comments"],
)
def test_inserted_below_blank_lines_and_above_comments(above: str, below: str) -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        codemod.insert_before(module.body[1], codemod.statements(module, "b"))

    assert edited(f"a\n{above}x\n", edit) == f"a\n{below}x\n"


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("from a import B\n", "from a import N, B\n"),
        ("from a import B as C\n", "from a import N, B as C\n"),
        ("from a import A, B, C\n", "from a import A, N, B, C\n"),
        ("from a import (B)\n", "from a import (N, B)\n"),
        ("from a import (A,B,)\n", "from a import (A,N,B,)\n"),
        (
            "from a import (\n    A,  # x\n    B,\n)\n",
            "from a import (\n    A,  # x\n    N,\n    B,\n)\n",
        ),
        ("import B\nfrom a import B\n", "import B\nfrom a import N, B\n"),
        ("x = 1; from a import B\n", "x = 1; from a import N, B\n"),
    ],
)
def test_a_name_is_imported_before_the_one_beside_it(source: str, result: str) -> None:
    assert edited(source, lambda codemod, module: codemod.import_name(module, "N", "B")) == result


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from a import C\n", 0),
        ("from a import *\n", 0),
        ("if x:\n    from a import B\n", 0),
        ("from a import B, N\n", 0),
        ("from a import B\nfrom b import B\n", 2),
    ],
    ids=["gone", "star", "under a condition", "there already", "twice"],
)
def test_a_name_is_not_imported_beside_an_import_that_is_not_there_once(
    source: str, found: int
) -> None:
    with pytest.raises(AnchorNotFoundError) as caught:
        edited(source, lambda codemod, module: codemod.import_name(module, "N", "B"))
    assert (caught.value.anchor, caught.value.found) == ("import of B without N", found)


@pytest.mark.parametrize(
    ("bases", "result"),
    [
        ("(A)", "(A, N)"),
        ("(A, B)", "(A, B, N)"),
        ("(A,B)", "(A,B,N)"),
        ("(a.A, B,)", "(a.A, B, N,)"),
        ("(A, metaclass=M)", "(A, N, metaclass=M)"),
        ("(\n    A,\n    B,\n)", "(\n    A,\n    B,\n    N,\n)"),
        ("(\n    A,\n    B\n)", "(\n    A,\n    B,\n    N\n)"),
        ("(A,\n        B)", "(A,\n        B,\n        N)"),
        ("(Generic[T], B)", "(Generic[T], B, N)"),
    ],
)
def test_a_base_is_laid_out_like_the_others(bases: str, result: str) -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        codemod.add_base(codemod.only_class(module, "K"), "N")

    assert edited(f"class K{bases}:\n    pass\n", edit) == f"class K{result}:\n    pass\n"


@pytest.mark.parametrize("bases", ["", "()", "(metaclass=M)", "(A, N)", "(N)", "(a.N, B)"])
def test_a_base_is_not_added_twice_nor_to_a_class_without(bases: str) -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        codemod.add_base(codemod.only_class(module, "K"), "N")

    with pytest.raises(AnchorNotFoundError, match="bases of class K without N"):
        edited(f"class K{bases}:\n    pass\n", edit)


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("    x = 1\n", f"    {MARKER}    n = 0\n    x = 1\n"),
        ('    """Doc."""\n', f'    """Doc."""\n    {MARKER}    n = 0\n'),
        ("    def f(self): ...\n", f"    {MARKER}    n = 0\n\n    def f(self): ...\n"),
        (
            "\n    @d\n    def f(self): ...\n",
            f"    {MARKER}    n = 0\n\n    @d\n    def f(self): ...\n",
        ),
        ("    # c\n    x = 1\n", f"    {MARKER}    n = 0\n    # c\n    x = 1\n"),
    ],
    ids=["an attribute", "a docstring", "a method", "a blank line and a method", "a comment"],
)
def test_a_class_attribute_comes_first(body: str, result: str) -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        codemod.add_class_attribute(module, codemod.only_class(module, "K"), "n = 0")

    rest = "    y = 2\n"
    assert edited(f"class K:\n{body}{rest}", edit) == f"class K:\n{result}{rest}"


TWO_METHODS = """
def f(self):
    pass

def g(self):
    pass
"""


def test_methods_come_before_the_forward() -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        codemod.add_methods(module, codemod.only_class(module, "K"), TWO_METHODS)

    assert edited("class K:\n    x = 1\n    # c\n    @d\n    def forward(self): ...\n", edit) == (
        f"class K:\n    x = 1\n\n    {MARKER}    def f(self):\n        pass\n\n"
        "    def g(self):\n        pass\n    # c\n    @d\n    def forward(self): ...\n"
    )


@pytest.mark.parametrize(
    ("body", "anchor"),
    [
        ("    def forward(self): ...\n    def f(self): ...\n", "class K without def f"),
        ("    def forward(self): ...\n    def g(self): ...\n", "class K without def g"),
        ("    def run(self): ...\n", "def forward"),
        ("    forward = None\n", "def forward"),
    ],
)
def test_methods_are_not_added_twice_nor_without_a_forward(body: str, anchor: str) -> None:
    def edit(codemod: Edited, module: cst.Module) -> None:
        codemod.add_methods(module, codemod.only_class(module, "K"), TWO_METHODS)

    with pytest.raises(AnchorNotFoundError) as caught:
        edited(f"class K:\n{body}", edit)
    assert caught.value.anchor == anchor


# Matchers and lists


def test_self_attribute_matches_that_attribute_of_self_only() -> None:
    matcher = self_attribute("norm")
    assert m.matches(cst.parse_expression("self.norm"), matcher)
    assert not m.matches(cst.parse_expression("self.other"), matcher)
    assert not m.matches(cst.parse_expression("model.norm"), matcher)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = f(1)", True),
        ("(a, b) = f(1, 2)", True),
        ("a, b = g(1)", False),
        ("a, c = f(1)", False),
        ("a, b, c = f(1)", False),
        ("a = f(1)", False),
        ("x = a, b = f(1)", False),
        ("a, b = f", False),
        ("a, b = f(1); c", False),
    ],
)
def test_assigns_matches_that_assignment_only(source: str, expected: bool) -> None:
    matcher = assigns("a", "b", value=m.Call(func=m.Name("f")))
    assert m.matches(cst.parse_statement(source), matcher) is expected


def test_matching_looks_at_the_statements_of_a_block_only() -> None:
    function = cst.ensure_type(
        cst.parse_statement("def f():\n    a\n    if x:\n        a\n"), cst.FunctionDef
    )
    matcher = m.SimpleStatementLine(body=[m.Expr(m.Name("a"))])
    assert matching(function.body, matcher) == [function.body.body[0]]


@pytest.mark.parametrize(
    ("listed", "result"),
    [
        ("[a]", "[a, n, n]"),
        ("[a, b]", "[a, b, n, n]"),
        ("[a, b,]", "[a, b, n, n,]"),
        ("[\n  a,\n  b,\n]", "[\n  a,\n  b,\n  n,\n  n,\n]"),
        ("[a, # c\n  b]", "[a, # c\n  b,\n  n,\n  n]"),
    ],
)
def test_appended_elements_are_laid_out_like_the_others(listed: str, result: str) -> None:
    node = cst.ensure_type(cst.parse_expression(listed), cst.List)
    new = [cst.Element(cst.Name("n")), cst.Element(cst.Name("n"))]
    changed = node.with_changes(elements=appended(node.elements, new))
    assert cst.Module(body=[]).code_for_node(changed) == result
