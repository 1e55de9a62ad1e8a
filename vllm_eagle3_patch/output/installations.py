"""``check --all``: a row an installation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.commands.report import Everywhere, Report
from vllm_eagle3_patch.ground.text import one_line
from vllm_eagle3_patch.output.blocks import Block, Columns, Line, print_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator


def print_everywhere(found: Everywhere) -> None:
    """A row an installation, and what is wrong with those that could not be read."""
    print_blocks(_everywhere_blocks(found))


def _everywhere_blocks(found: Everywhere) -> Iterator[Block]:
    if not found.reports:
        yield Line("No vLLM was found. To look elsewhere too: --search DIR")
        return
    header = ("version", "location", "interpreter", "state", "exit code")
    yield Columns(header, tuple(map(_everywhere_row, found.reports)))
    for report in found.reports:
        if report.installation is None or report.state is None:
            for problem in report.problems:
                yield Line(f"{one_line(problem.code)}: {one_line(problem.message)}")


def _everywhere_row(report: Report) -> tuple[str, ...]:
    installation = report.installation
    shown = ("-", "-", "-")
    if installation is not None:
        place = one_line(installation.package)
        shown = (installation.version or "-", place, one_line(installation.python or "-"))
    return (*shown, report.state or "error", str(report.exit_code))
