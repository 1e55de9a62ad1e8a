"""Take vLLM's own EAGLE-3 support out of its DeepSeek-V2/V3, so that ours can be put in and run.

vLLM 0.18.0 and later have that support, and only from 0.20 on does the CPU backend speculate: to
run our patch without a GPU, such a release is first made to look as if it never had it. Only
``deepseek_v2.py`` is changed. Its row in RECORD is made to fit, so that it counts as installed
like that: a local build, and not a file edited by hand.

    python remove_native_support.py SITE_PACKAGES
"""

from __future__ import annotations

import ast
import base64
import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import libcst as cst
from libcst import matchers as m
from libcst.codemod import CodemodContext

from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod, matching, self_attribute

DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
INTERFACES = "vllm/model_executor/models/interfaces.py"
PROTOCOL = "SupportsEagle3"
MODEL, OUTER = "DeepseekV2Model", "DeepseekV2ForCausalLM"
METHODS = ("set_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")
LAYER_IDS, STATES = "aux_hidden_state_layers", "aux_hidden_states"
GONE = (PROTOCOL, LAYER_IDS, STATES, *METHODS)

SETS_IDS = m.SimpleStatementLine(
    body=[
        m.Assign(targets=[m.AssignTarget(self_attribute(LAYER_IDS))])
        | m.AnnAssign(target=self_attribute(LAYER_IDS))
    ]
)
SETS_STATES = m.SimpleStatementLine(
    body=[
        m.Assign(targets=[m.AssignTarget(m.Name(STATES))], value=m.List(elements=[]))
        | m.AnnAssign(target=m.Name(STATES), value=m.List(elements=[]))
    ]
)
NUMBERED_LOOP = m.For(
    target=m.Tuple(elements=[m.Element(m.Name()), m.Element(m.Name("layer"))]),
    iter=m.Call(
        func=m.Name("enumerate"),
        args=[
            m.Arg(m.Call(func=m.Name("islice"))),
            m.Arg(self_attribute("start_layer"), keyword=m.Name("start")),
        ],
    ),
)
RETURNS_BOTH = m.If(
    body=m.IndentedBlock(
        body=[
            m.SimpleStatementLine(
                body=[
                    m.Return(
                        m.Tuple(
                            elements=[m.Element(m.Name("hidden_states")), m.Element(m.Name(STATES))]
                        )
                    )
                ]
            )
        ]
    ),
    orelse=None,
)

Listed = TypeVar("Listed", cst.Arg, cst.ImportAlias)


class UnexpectedError(Exception):
    """This installation is not what can be undone here."""


class RemoveNativeSupport(AnchoredCodemod):
    """Undo what vLLM's pull request 36361 and its successors added."""

    patch = "remove-native-support"

    def edit(self, module: cst.Module) -> None:
        """Find the import, the base, both methods, and what the inner model sets and collects."""
        imported = m.ImportFrom(
            names=[m.ZeroOrMore(), m.ImportAlias(name=m.Name(PROTOCOL)), m.ZeroOrMore()]
        )
        statement = self.only(m.findall(module, imported), f"import of {PROTOCOL}", "the module")
        self.change(statement, lambda node: node.with_changes(names=without(node.names, PROTOCOL)))
        outer = self.only_class(module, OUTER)
        self.only(m.findall(outer, m.Arg(m.Name(PROTOCOL))), f"base {PROTOCOL}", OUTER)
        self.change(outer, lambda node: node.with_changes(bases=without(node.bases, PROTOCOL)))
        for name in METHODS:
            self.remove(self.only_method(outer, name))
        inner = self.only_class(module, MODEL)
        constructor = self.only_method(inner, "__init__")
        anchor = f"self.{LAYER_IDS} = ..."
        self.remove(self.only(matching(constructor.body, SETS_IDS), anchor, f"{MODEL}.__init__"))
        self._collect_nothing(self.only_method(inner, "forward"))

    def _collect_nothing(self, forward: cst.FunctionDef) -> None:
        where = f"{MODEL}.forward"
        states = self.only(matching(forward.body, SETS_STATES), f"{STATES} = []", where)
        anchor = "for ..., layer in enumerate(islice(...), start=self.start_layer)"
        loop = self.only(matching(forward.body, NUMBERED_LOOP), anchor, where)
        loop = cst.ensure_type(loop, cst.For)
        number, layer = cst.ensure_type(loop.target, cst.Tuple).elements
        name = cst.ensure_type(number.value, cst.Name).value
        collects = _asks_for(m.Name(name))
        anchor = f"if {name} in self.{LAYER_IDS}"
        collected = self.only(matching(loop.body, collects), anchor, where)
        if len(m.findall(loop.body, m.Name(name))) != 1:
            self.only((), f"a loop without other use of {name}", where)
        last = matching(forward.body, _asks_for(self_attribute("end_layer")))
        if last:  # from 0.25.0 on
            self.remove(self.only(last, f"if self.end_layer in self.{LAYER_IDS}", where))
        returned = self.only(matching(forward.body, RETURNS_BOTH), f"return both {STATES}", where)

        self.remove(states)
        above = cst.ensure_type(states, cst.SimpleStatementLine).leading_lines
        self.change(
            loop, lambda node: node.with_changes(leading_lines=[*above, *node.leading_lines])
        )
        self.change(loop.target, lambda _: layer.value)
        self.change(loop.iter, lambda node: node.args[0].value)
        self.remove(collected)
        self.remove(returned)

    def remove(self, node: cst.CSTNode) -> None:
        """Leave a statement out."""
        self.change(node, lambda _: cst.RemovalSentinel.REMOVE)


def _asks_for(layer: m.BaseExpressionMatchType) -> m.If:
    """A matcher for ``if <layer> in self.aux_hidden_state_layers`` without ``else``."""
    target = m.ComparisonTarget(operator=m.In(), comparator=self_attribute(LAYER_IDS))
    return m.If(test=m.Comparison(left=layer, comparisons=[target]), orelse=None)


def without(listed: Sequence[Listed], name: str) -> list[Listed]:
    """The bases or imported names but one; a new last one ends as the old one did."""
    (gone,) = (
        node
        for node in listed
        if m.matches(node, m.Arg(m.Name(name)) | m.ImportAlias(m.Name(name)))
    )
    others = [node for node in listed if node is not gone]
    if gone is listed[-1]:
        others[-1] = others[-1].with_changes(comma=gone.comma)
    return others


def remove(site_packages: Path) -> None:
    """Take the support out of the vLLM in a folder.

    Files are replaced and not written in place: they may be hard links into an installer's cache.

    Raises:
        UnexpectedError: Something is not as in the releases that this was written for.
        AnchorNotFoundError: A statement to be removed is missing, or there is more than one.
    """
    path = site_packages / DEEPSEEK
    before = path.read_bytes()
    record, row = _recorded(site_packages, before)
    tree = cst.parse_module(before)
    codemod = RemoveNativeSupport(CodemodContext(filename=DEEPSEEK))
    changed = codemod.transform_module_impl(tree)
    left = sorted(
        {node.value for node in m.findall(changed, m.Name()) if node.value in GONE}  # type: ignore[attr-defined]
    )
    if left:
        raise UnexpectedError(f"{DEEPSEEK} still mentions {', '.join(left)}")
    _has_nothing_else(site_packages, changed.bytes)
    _replace(path, changed.bytes)
    content = record.read_bytes()
    _replace(record, content.replace(row, _row(changed.bytes)))


def _has_nothing_else(site_packages: Path, deepseek: bytes) -> None:
    """Make sure that no other base of the class is an EAGLE-3 target by itself.

    Raises:
        UnexpectedError: One is.
    """
    interfaces = (site_packages / INTERFACES).read_bytes()
    bases = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for source in (interfaces, deepseek)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    if PROTOCOL not in bases:
        raise UnexpectedError(f"{INTERFACES} has no class {PROTOCOL}")
    to_visit, chain = [OUTER], []
    while to_visit:
        chain.append(to_visit.pop())
        to_visit.extend(bases.get(chain[-1], ()))
    if PROTOCOL in chain:
        raise UnexpectedError(f"{OUTER} still is a {PROTOCOL}, by way of {', '.join(chain[1:-1])}")


def _recorded(site_packages: Path, content: bytes) -> tuple[Path, bytes]:
    """The RECORD that lists the file, and the row that does.

    Raises:
        UnexpectedError: None does or several do, or the file is not as it was installed.
    """
    pattern = re.compile(rb"^%s,sha256=[^,\r\n]*,[0-9]*" % re.escape(DEEPSEEK.encode()), re.M)
    found = [
        (record, row)
        for record in sorted(site_packages.glob("*.dist-info/RECORD"))
        for row in pattern.findall(record.read_bytes())
    ]
    if len(found) != 1:
        raise UnexpectedError(f"{len(found)} rows of a RECORD list {DEEPSEEK}")
    if found[0][1] != _row(content):
        raise UnexpectedError(f"{DEEPSEEK} is not as it was installed")
    return found[0]


def _row(content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return b"%s,sha256=%s,%d" % (DEEPSEEK.encode(), digest, len(content))


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    shutil.copymode(path, new)
    new.replace(path)


if __name__ == "__main__":
    remove(Path(sys.argv[1]))
