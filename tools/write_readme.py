"""Write what README.md takes from the matrix and the family's table."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.family import FAMILY

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- support: written by `make docs` -->"
END = "<!-- end of support -->"

GROUPS = tuple(dict.fromkeys(model.columns.readme for model in FAMILY))

WRAPPERS = re.compile(r"^.*(?=\| each wrapper hands the interface on )", re.MULTILINE)
"""The names in that row of the table of patches."""

WORDS = {"native": "native", "patch": "**patch**", "interface": "interface", "unsupported": "no"}


def table() -> str:
    """The table, in Markdown: a row for each run of releases that are alike."""
    lines = [f"| vLLM | {' | '.join(GROUPS)} |", f"| --- |{' --- |' * len(GROUPS)}"]
    for cells, group in groupby(matrix.oldest_first(), key=_cells):
        names = [release.name for release in group]
        releases = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"| {releases} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(release: matrix.Release) -> tuple[str, ...]:
    support = {model.architecture: model.support for model in release.models}
    cells = []
    for group in GROUPS:
        levels = {support.get(m.architecture) for m in FAMILY if m.columns.readme == group}
        words = [word for level, word in WORDS.items() if level in levels]
        cells.append(" or ".join(words) or "-")
    return tuple(cells)


def document(current: str) -> str:
    """The document with both tables as they should be; all else is kept."""
    wrappers = dict.fromkeys(f"`{m.wrapper.patch}`" for m in FAMILY if m.wrapper is not None)
    current, rows = WRAPPERS.subn(f"| {', '.join(wrappers)} ", current)
    assert rows == 1, f"{README} lacks the row of the wrappers"
    before, begin, rest = current.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{README} lacks a marker"
    return f"{before}{begin}\n\n{table()}\n{end}{after}"


def main() -> int:
    """Write the document."""
    README.write_text(document(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(README)
    return 0


if __name__ == "__main__":
    sys.exit(main())
