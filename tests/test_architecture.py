"""The packages stand on each other in one order, and no import, for types or not, goes up."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "vllm_eagle3_patch"

ORDER = (
    "cli",
    "doctor",
    "output",
    "commands",
    "verify",
    "assess",
    "patches",
    "codemod",
    "installation",
    "transaction",
    "vllm_source",
    "transaction.state",
    "ground",
)
"""From top to bottom; docs/architecture.md has the same table. The program's own ``__main__`` is
above all, its version below all."""

FLOORS = 12
ENTRIES = 14


def modules(root: Path) -> dict[str, Path]:
    """Every module of the program by its dotted name; those of ``patches/`` by the link."""
    files = {*root.glob(f"{PROGRAM}/*.py"), *root.glob(f"{PROGRAM}/*/**/*.py")}
    if not any("patches" in file.parts[-3:] for file in files):  # Older globs follow no link.
        files |= {root / PROGRAM / f.relative_to(root) for f in root.glob("patches/**/*.py")}
    names = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }
    return dict(sorted(names.items()))


def imports(name: str, file: Path, known: set[str]) -> set[str]:
    """The modules of the program that one imports, anywhere in it, also for types only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return (found & known) - {name}


def graph(root: Path) -> dict[str, set[str]]:
    found = modules(root)
    return {name: imports(name, file, set(found)) for name, file in found.items()}


def room(name: str) -> str | None:
    """The package of ``ORDER`` that a module is in; None for the program's own two."""
    inner = name.removeprefix(f"{PROGRAM}.")
    rooms = [r for r in ORDER if inner == r or inner.startswith(f"{r}.")]
    return max(rooms, key=len, default=None)


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Each import that leads from a package to one above it."""
    level = {None: len(ORDER), **{name: number for number, name in enumerate(ORDER)}}
    return [
        f"{name} imports {other}"
        for name, others in edges.items()
        if name != f"{PROGRAM}.__main__"
        for other in others
        if level[room(other)] < level[room(name)]
    ]


def longest_chain(edges: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports.

    Raises:
        ValueError: There is a circle.
    """
    above: list[str] = []

    @cache
    def below(name: str) -> tuple[str, ...]:
        if name in above:
            raise ValueError(" -> ".join([*above[above.index(name) :], name]))
        above.append(name)
        chain = max((below(other) for other in sorted(edges[name])), key=len, default=())
        above.pop()
        return (name, *chain)

    return list(max(map(below, edges), key=len))


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return graph(ROOT)


def test_every_module_is_in_a_room(edges: dict[str, set[str]]) -> None:
    assert len(edges) > 100
    assert {name for name in edges if room(name) is None} == {PROGRAM, f"{PROGRAM}.__main__"}


def test_imports_go_down_only(edges: dict[str, set[str]]) -> None:
    assert upward(edges) == []


def test_there_is_no_circle_and_few_floors(edges: dict[str, set[str]]) -> None:
    chain = longest_chain(edges)
    assert len(chain) <= FLOORS, chain


def test_few_entries() -> None:
    entries = {entry.name for entry in (ROOT / PROGRAM).iterdir()} - {"__pycache__"}
    assert len(entries) <= ENTRIES, sorted(entries)


def test_the_document_has_the_same_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    shown = tuple(row.strip(" `/").replace("/", ".") for row in rows)
    assert shown[: len(ORDER)] == ORDER


def test_a_broken_order_and_a_circle_are_noticed(tmp_path: Path) -> None:
    sources = {
        "ground/errors.py": "",
        "assess/plan.py": "import vllm_eagle3_patch.ground.errors",
        "commands/apply.py": "from vllm_eagle3_patch.assess import plan",
    }
    for path, source in sources.items():
        file = tmp_path / PROGRAM / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    found = graph(tmp_path)
    assert upward(found) == []
    assert [name.rpartition(".")[2] for name in longest_chain(found)] == ["apply", "plan", "errors"]
    (tmp_path / PROGRAM / "ground/errors.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from vllm_eagle3_patch.commands.apply import Report\n"
    )
    found = graph(tmp_path)
    assert upward(found) == [
        "vllm_eagle3_patch.ground.errors imports vllm_eagle3_patch.commands.apply"
    ]
    with pytest.raises(ValueError, match=r"plan -> .*errors -> .*apply -> .*plan"):
        longest_chain(found)
