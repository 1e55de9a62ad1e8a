"""Going through LibCST's trees without building them anew, as its own visitors do at each node.

White space and comments, more than half of all nodes, are passed over.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING

import libcst as cst
from libcst import matchers as m

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


def find_all(within: cst.CSTNode, matcher: m.BaseMatcherNode) -> list[cst.CSTNode]:
    """What ``matchers.findall`` finds: every node that matches, this one included.

    Args:
        within: Where.
        matcher: One of the classes that are named as the node they match, or ``OneOf`` such.
    """
    options = matcher.options if isinstance(matcher, m.OneOf) else (matcher,)
    kinds = {type(option).__name__ for option in options}
    return [
        node for node in _walk(within) if type(node).__name__ in kinds and m.matches(node, matcher)
    ]


def holders(
    module: cst.Module, wanted: Collection[cst.CSTNode], closed: Collection[cst.CSTNode]
) -> set[cst.CSTNode]:
    """The nodes that hold one of those wanted, and these; what is closed is not searched."""
    found: set[cst.CSTNode] = set()
    missing = set(wanted)

    def search(node: cst.CSTNode) -> bool:
        holds = node in missing
        missing.discard(node)
        if node not in closed:
            for child in _children(node):
                if not missing:
                    break
                holds = search(child) or holds
        if holds:
            found.add(node)
        return holds

    search(module)
    return found


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(_children(node)))


def _children(node: cst.CSTNode) -> list[cst.CSTNode]:
    children: list[cst.CSTNode] = []
    for name in _names(type(node)):
        value = getattr(node, name)
        kind = type(value)
        if kind is list or kind is tuple:
            children.extend(value)
        elif kind not in _NO_NODES:
            children.append(value)
    return children


_NO_NODES = {type(None), bool, int, str, cst.MaybeSentinel}
_LAYOUT = ("whitespace", "leading_lines", "lines_after", "trailing", "header", "footer")


@cache
def _names(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """A node's fields without white space and comments; decorators come first, as in the file."""
    names = [field.name for field in fields(kind) if not field.name.startswith(_LAYOUT)]
    return tuple(sorted(names, key=lambda name: name != "decorators"))
