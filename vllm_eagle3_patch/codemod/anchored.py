"""What every codemod is built from: anchors found once or not at all, and edits in one pass.

A codemod here never guesses. It names the places it changes (anchors), finds each exactly once
or raises ``AnchorNotFoundError``, and leaves every other byte of the file as it was: LibCST
keeps formatting, comments, line endings and encoding.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

import libcst as cst
from libcst import matchers as m
from libcst.codemod import Codemod, CodemodContext

from vllm_eagle3_patch.codemod.nodes import find_all, holders
from vllm_eagle3_patch.ground.errors import AnchorNotFoundError, UnknownStatementError
from vllm_eagle3_patch.ground.family import FAMILY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.vllm_source.syntax import FunctionNode

MARKER = "# vllm-eagle3-patch: "
"""Every inserted block starts with this comment and the patch's name."""

Node = TypeVar("Node", bound=cst.CSTNode)
_OPENED = (cst.ClassDef, cst.FunctionDef)
Listed = TypeVar("Listed", cst.Arg, cst.Element, cst.ImportAlias)


class AnchoredCodemod(Codemod, ABC):
    """A codemod that changes one file of vLLM, at anchors.

    Subclasses set ``patch`` (the name in the marker comments and in errors) and override
    :meth:`edit`. They name in ``looks_into`` the functions (``function`` or ``Class.method``)
    whose bodies it reads or changes in a release of the matrix: of a file that is known by its
    sha256 all other bodies are left out when it is parsed, which is quick, and the result counts
    if its sha256 is known too. A function that is not named makes that slow, never wrong.

    Args:
        context: LibCST's; its filename is what errors call the file.
        models: The models of the family that the installation ships.
        protocol: Whether its ``interfaces.py`` has the protocol ``SupportsEagle3``.
    """

    patch: ClassVar[str]
    looks_into: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        context: CodemodContext,
        models: Sequence[FamilyModel] = FAMILY,
        protocol: bool = True,
    ) -> None:
        super().__init__(context)
        self.models = models
        self.protocol = protocol
        self._opened: set[cst.CSTNode] = set()
        self._edits: dict[cst.CSTNode, list[Callable[..., object]]] = {}

    @abstractmethod
    def edit(self, module: cst.Module) -> None:
        """Find the anchors and say with :meth:`change` what becomes of each.

        Raises:
            AnchorNotFoundError: An anchor is missing, or there is more than one.
        """

    def transform_module_impl(self, tree: cst.Module) -> cst.Module:
        """Apply all edits in one pass over what holds them."""
        self._edits.clear()
        self._opened.clear()
        self.edit(tree)
        edits = _ApplyEdits(self._edits, holders(tree, self._edits, self._closed(tree)))
        changed = cst.ensure_type(tree.visit(edits), cst.Module)
        assert edits.applied == set(self._edits), "an edit lies outside what was opened"
        return changed

    def _closed(self, module: cst.Module) -> set[cst.CSTNode]:
        """The classes and functions that hold no edit, if it was said which do.

        Of a class of which no method was opened, all may.
        """
        if not self._opened:
            return set()
        owners = [node for node in self._opened if isinstance(node, cst.ClassDef)]
        blocks = [module.body, *(owner.body.body for owner in owners)]
        defined = [[node for node in block if isinstance(node, _OPENED)] for block in blocks]
        opened = self._opened | set(self._edits)
        return {
            node
            for nodes in defined
            if not self._opened.isdisjoint(nodes)
            for node in nodes
            if node not in opened
        }

    def change(self, node: cst.CSTNode, edit: Callable[..., object]) -> None:
        """Replace a node by what ``edit`` makes of it (its children already edited)."""
        self._edits.setdefault(node, []).append(edit)

    def only(self, found: Sequence[Node], anchor: str, where: str) -> Node:
        """The one node found.

        Args:
            found: What matched.
            anchor: What was looked for, in words, for the error.
            where: The class or function it was looked for in.

        Raises:
            AnchorNotFoundError: Nothing matched, or more than one place did.
        """
        if len(found) != 1:
            raise AnchorNotFoundError(self.patch, self._path, anchor, where, len(found))
        return found[0]

    @property
    def _path(self) -> str:
        return self.context.filename or "<source>"

    def only_class(self, module: cst.Module, name: str) -> cst.ClassDef:
        """The module-level class of this name."""
        found = [n for n in module.body if m.matches(n, m.ClassDef(name=m.Name(name)))]
        return self.opened(self.only(found, f"class {name}", "the module"))

    def opened(self, owner: cst.CSTNode) -> cst.ClassDef:
        """A module-level class that is edited inside; with one, all others are passed over."""
        self._opened.add(owner)
        return cst.ensure_type(owner, cst.ClassDef)

    def never_replaced(self, module: cst.Module, names: Sequence[str]) -> None:
        """Make sure that no statement gives one of these classes other attributes, or its name.

        Raises:
            UnknownStatementError: One does.
        """
        name = m.OneOf(*map(m.Name, names))
        target = m.AssignTarget(name | m.Attribute(value=name))
        sets = m.Call(func=m.Name("setattr"), args=[m.Arg(name), m.ZeroOrMore()])
        wanted = m.Assign(targets=[m.ZeroOrMore(), target, m.ZeroOrMore()])
        for node in (*find_all(module, wanted), *find_all(module, sets)):
            statement = f"`{module.code_for_node(node).splitlines()[0]}`"
            raise UnknownStatementError(self.patch, self._path, statement, "the module")

    def only_class_with(self, module: cst.Module, method: str) -> cst.ClassDef:
        """The one module-level class that has a method of this name."""
        wanted = m.FunctionDef(name=m.Name(method))
        found = [n for n in module.body if isinstance(n, cst.ClassDef) and matching(n.body, wanted)]
        return self.opened(self.only(found, f"class with def {method}", "the module"))

    def absent(self, within: cst.CSTNode, names: Sequence[str], where: str) -> None:
        """Make sure that none of these names is used: nobody did half of this by hand.

        Raises:
            AnchorNotFoundError: One of them is.
        """
        used = {cst.ensure_type(n, cst.Name).value for n in find_all(within, m.Name())}
        for name in names:
            if name in used:
                self.only((), f"{where} without {name}", "the module")

    def only_method(self, owner: cst.ClassDef, name: str) -> cst.FunctionDef:
        """A class's own method of this name."""
        found = [n for n in owner.body.body if m.matches(n, m.FunctionDef(name=m.Name(name)))]
        method = self.only(found, f"def {name}", owner.name.value)
        self._opened.add(method)
        return cst.ensure_type(method, cst.FunctionDef)

    def only_known(
        self,
        module: cst.Module,
        function: cst.FunctionDef,
        unknown: Callable[[FunctionNode], ast.AST | None],
        where: str,
    ) -> None:
        """Make sure that a function holds only what the patch knows.

        Raises:
            UnknownStatementError: It holds something else, which the error names.
        """
        parsed = ast.parse(module.code_for_node(function)).body[0]
        assert isinstance(parsed, ast.FunctionDef | ast.AsyncFunctionDef)
        found = unknown(parsed)
        if found is not None:
            statement = f"`{ast.unparse(found).splitlines()[0]}`"
            raise UnknownStatementError(self.patch, self._path, statement, where)

    def statements(
        self, module: cst.Module, source: str
    ) -> list[cst.BaseCompoundStatement | cst.SimpleStatementLine]:
        """Parse statements to insert, with the file's own line endings and indentation.

        The marker comment goes above the first one.
        """
        source = textwrap.dedent(source).strip() + "\n"
        parsed = cst.parse_module(source, config=module.config_for_parsing)
        if "\n\n" in source:
            parsed = cst.ensure_type(parsed.visit(_UnindentBlankLines()), cst.Module)
        first, *others = parsed.body
        comments = [*parsed.header, *getattr(first, "leading_lines", ())]
        marked = first.with_changes(leading_lines=[self.marker_line(), *comments])
        return [marked, *others]

    def marker_line(self) -> cst.EmptyLine:
        """The marker comment on a line of its own."""
        return cst.EmptyLine(comment=cst.Comment(MARKER + self.patch))

    def implement_eagle3(
        self, module: cst.Module, owner: cst.ClassDef, beside: Sequence[str]
    ) -> None:
        """Make a class implement ``SupportsEagle3``, where this vLLM has the protocol.

        Up to 0.10.0 the model runner calls the two methods by name and there is none. The import
        goes before the first of ``beside`` that the file imports.
        """
        if self.protocol:
            imported = [name for name in beside if _imports_of(module, name)]
            self.import_name(module, "SupportsEagle3", [*imported, *beside][0])
            self.add_base(owner, "SupportsEagle3")

    def import_name(self, module: cst.Module, name: str, beside: str) -> None:
        """Add ``name`` before ``beside`` to the ``from ... import`` that imports it.

        Raises:
            AnchorNotFoundError: No such import, more than one, or ``name`` is there already.
        """
        found = _imports_of(module, beside)
        anchor = f"import of {beside} without {name}"
        statement = cst.ensure_type(self.only(found, anchor, "the module"), cst.ImportFrom)
        names = statement.names
        assert not isinstance(names, cst.ImportStar)
        if any(m.matches(n, m.ImportAlias(name=m.Name(name))) for n in names):
            self.only((), anchor, "the module")
        index = [n.evaluated_name for n in names].index(beside)
        new = cst.ImportAlias(cst.Name(name), comma=_separator(names))
        self.change(
            statement,
            lambda node: node.with_changes(names=[*node.names[:index], new, *node.names[index:]]),
        )

    def add_base(self, owner: cst.ClassDef, name: str) -> None:
        """Add a base class after the others.

        Raises:
            AnchorNotFoundError: The class has that base already, or has no base.
        """
        anchor = f"bases of class {owner.name.value} without {name}"
        same = m.Arg(value=m.Name(name) | m.Attribute(attr=m.Name(name)))
        if not owner.bases or any(m.matches(base, same) for base in owner.bases):
            self.only((), anchor, "the module")
        self.change(
            owner,
            lambda node: node.with_changes(bases=appended(node.bases, [cst.Arg(cst.Name(name))])),
        )

    def add_class_attribute(self, module: cst.Module, owner: cst.ClassDef, source: str) -> None:
        """Add an attribute before everything else in a class but its docstring."""
        attribute = self.statements(module, source)
        first = owner.body.body[1 if owner.get_docstring() is not None else 0]

        def above(node: cst.BaseStatement) -> cst.FlattenSentinel[cst.BaseStatement]:
            lines = getattr(node, "leading_lines", ())
            if not lines and isinstance(node, cst.FunctionDef):
                node = node.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            return cst.FlattenSentinel([*attribute, node])

        self.change(first, above)

    def add_methods(self, module: cst.Module, owner: cst.ClassDef, source: str) -> None:
        """Add methods before a class's ``forward``.

        Raises:
            AnchorNotFoundError: The class has no ``forward``, or one of the methods already.
        """
        methods = self.statements(module, source)
        for method in methods:
            name = cst.ensure_type(method, cst.FunctionDef).name.value
            if any(m.matches(n, m.FunctionDef(name=m.Name(name))) for n in owner.body.body):
                self.only((), f"class {owner.name.value} without def {name}", "the module")
        first, *others = methods
        spaced = first.with_changes(
            leading_lines=[cst.EmptyLine(indent=False), *first.leading_lines]
        )
        forward = self.only_method(owner, "forward")
        self.change(forward, lambda node: cst.FlattenSentinel([spaced, *others, node]))

    def insert_before(self, node: cst.CSTNode, new: Iterable[cst.BaseStatement]) -> None:
        """Insert statements before a statement, below the blank lines above it."""
        first, *others = new

        def below_blank_lines(anchor: cst.BaseStatement) -> cst.FlattenSentinel[cst.CSTNode]:
            lines = list(getattr(anchor, "leading_lines", ()))
            blank = list(itertools.takewhile(lambda line: line.comment is None, lines))
            anchor = anchor.with_changes(leading_lines=lines[len(blank) :])
            top = first.with_changes(leading_lines=[*blank, *getattr(first, "leading_lines", ())])
            return cst.FlattenSentinel([top, *others, anchor])

        self.change(node, below_blank_lines)

    def insert_after(self, node: cst.CSTNode, new: Iterable[cst.BaseStatement]) -> None:
        """Insert statements after a statement."""
        after = list(new)
        self.change(node, lambda updated: cst.FlattenSentinel([updated, *after]))


class _UnindentBlankLines(cst.CSTTransformer):
    """Blank lines of inserted code hold no spaces."""

    def leave_EmptyLine(  # noqa: N802  LibCST names it
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine:
        return updated_node.with_changes(indent=updated_node.comment is not None)


class _ApplyEdits(cst.CSTTransformer):
    def __init__(
        self, edits: dict[cst.CSTNode, list[Callable[..., object]]], holding: set[cst.CSTNode]
    ) -> None:
        super().__init__()
        self._edits = edits
        self._holding = holding
        self.applied: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._holding

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        nodes = [updated_node]
        for edit in self._edits.get(original_node, ()):
            # What an earlier edit put above the node stays there.
            edited = edit(nodes.pop())
            nodes += edited if isinstance(edited, cst.FlattenSentinel) else [edited]
            self.applied.add(original_node)
        return nodes[0] if len(nodes) == 1 else cst.FlattenSentinel(nodes)


def _imports_of(module: cst.Module, name: str) -> list[cst.CSTNode]:
    """The ``from ... import`` statements at module level that import a name."""
    alias = m.ImportAlias(name=m.Name(name))
    wanted = m.ImportFrom(names=[m.ZeroOrMore(), alias, m.ZeroOrMore()])
    return [
        part
        for line in module.body
        if isinstance(line, cst.SimpleStatementLine)
        for part in line.body
        if m.matches(part, wanted)
    ]


def self_attribute(name: str) -> m.Attribute:
    """A matcher for ``self.<name>``."""
    return m.Attribute(value=m.Name("self"), attr=m.Name(name))


def assigns(*names: str, value: m.BaseExpressionMatchType) -> m.SimpleStatementLine:
    """A matcher for the statement ``a, b = <value>``."""
    target = m.Tuple(elements=[m.Element(m.Name(name)) for name in names])
    return m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target)], value=value)])


def matching(block: cst.BaseSuite, matcher: m.BaseMatcherNode) -> list[cst.CSTNode]:
    """The statements directly in a block that a matcher accepts."""
    return [node for node in block.body if m.matches(node, matcher)]


def _comment_of(space: object) -> cst.TrailingWhitespace | None:
    """The rest of the line in a parenthesized white space, if it holds a comment."""
    if isinstance(space, cst.ParenthesizedWhitespace) and space.first_line.comment is not None:
        return space.first_line
    return None


def without_comment(space: cst.ParenthesizedWhitespace) -> cst.ParenthesizedWhitespace:
    """The same line break without the comment on its first line."""
    line = cst.TrailingWhitespace(newline=space.first_line.newline)
    return space.with_changes(first_line=line)


def appended(listed: Sequence[cst.CSTNode], new: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
    """Elements, arguments or bases with more of them at the end, laid out like the others."""
    separator = _separator(listed)
    *others, last = listed
    closing = last.comma  # type: ignore[attr-defined]
    spaced = [node.with_changes(comma=separator) for node in (last, *new)]
    line = _comment_of(getattr(closing, "whitespace_after", None))
    if line is not None:
        # The comment stays beside the element that it is about.
        space = separator.whitespace_after
        if not isinstance(space, cst.ParenthesizedWhitespace):
            space = cst.ParenthesizedWhitespace(indent=True)
        beside = cst.Comma(whitespace_after=space.with_changes(first_line=line))
        spaced[0] = spaced[0].with_changes(comma=beside)
        closing = closing.with_changes(whitespace_after=without_comment(closing.whitespace_after))
    spaced[-1] = spaced[-1].with_changes(comma=closing)
    return [*others, *spaced]


def _separator(listed: Sequence[cst.CSTNode]) -> cst.Comma:
    """The comma between the first two elements, without a comment that follows it."""
    comma = getattr(listed[0], "comma", None)
    if len(listed) < 2 or not isinstance(comma, cst.Comma):  # noqa: PLR2004
        return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    space = comma.whitespace_after
    if isinstance(space, cst.ParenthesizedWhitespace):
        space = without_comment(space).with_changes(empty_lines=[])
    return comma.with_changes(whitespace_after=space)
