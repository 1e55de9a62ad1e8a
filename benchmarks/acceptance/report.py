"""From ``results.jsonl`` to the tables of the README: ``python -m benchmarks.acceptance.report``.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.acceptance.counting import Counts, difference, largest_gap
from benchmarks.acceptance.rows import AHEAD, SERVED_AHEAD, Row, rows

TOLERANCE = 0.01
"""Of the drafts. In bfloat16 vLLM's kernels and transformers round otherwise, and where two tokens
are nearly as likely the draft model may take the other one; 0.4 % was seen on a GPU, 0.9 % on a
CPU. Ids one layer off must differ by more, and do: ``nearest other``."""
README = Path(__file__).resolve().with_name("README.md")
BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """All lines; the last one may be cut off."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def summary(output: str) -> Line:
    """What the tables need of a JSON document of our command line."""
    try:
        document = json.loads(output)
    except json.JSONDecodeError:
        return {}
    found = {name: document[name] for name in ("tool", "state", "changed") if name in document}
    if "tool" in found:
        found["version"] = found.pop("tool")
    if document.get("vllm"):
        found["vllm"] = document["vllm"].get("version")
    return found


def last_error(output: str) -> str:
    """The last line that names an error; what a dying process says after it is of no use."""
    lines = output.strip().splitlines() or ["no output"]
    return next((text for text in reversed(lines) if "Error: " in text), lines[-1])[:500]


def sentence(output: str, wanted: str) -> str:
    """The line that holds an error's text; empty without one."""
    return next((line.strip()[:500] for line in output.splitlines() if wanted in line), "")


class Found:
    """What is known of one release.

    Args:
        lines: The results; of a row that was run again, the last counts. A row belongs to the
            models that were told of before it.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.about: Line = {}
        self.rows: dict[str, Line] = {}
        self.tools: dict[tuple[str, str], Line] = {}
        self.doctor: dict[str, Line] = {}
        for line in lines:
            if "about" in line:
                self.about = line["about"]
            elif "row" in line:
                self.rows[line["row"]] = line | {"about": self.about}
            elif "tool" in line:
                self.tools[line["tool"], line["variant"]] = line
            elif "doctor" in line:
                self.doctor[line["doctor"]] = line

    def simulated(self, row: Row) -> dict[tuple[int, ...], Counts]:
        """The simulation's counts for the row's draft model, by the ids that it is given."""
        about = self.rows[row.name]["about"]
        dtype = row.dtype or about.get("dtype")
        ahead = SERVED_AHEAD if row.kind == "serve" else AHEAD
        return {
            tuple(one["ids"]): Counts(**one["counts"])
            for one in about.get("counts", ())
            if (one["dtype"], one["draft"], one["ahead"]) == (dtype, row.draft, ahead)
        }

    def reference(self, row: Row) -> list[str] | None:
        """The texts that the row's must equal: the same without EAGLE-3, or unpatched."""
        half = "float16 " if row.dtype else ""
        mode = "eager" if row.mode == "eager" else "graphs"
        about = self.rows[row.name]["about"]
        for name in self._references(row, half, mode):
            other = self.rows.get(name, {})
            if other.get("texts") and name != row.name and other["about"] == about:
                return list(other["texts"])
        return None

    @staticmethod
    def _references(row: Row, half: str, mode: str) -> tuple[str, ...]:
        # Other kernels and other sums round otherwise: only the same engine tells.
        if "tensor_parallel_size" in row.engine:
            return ("tensor parallel 2 without EAGLE-3, eager",) if row.draft else ()
        if "attention_backend" in row.engine:
            plain = f"forced {row.engine['attention_backend']} without EAGLE-3, {mode}"
            return (plain,) if row.draft else ()
        if row.mode == "only-graphs":
            return ()
        stock = () if half else (f"stock, {mode}",)
        plain = f"{half}without EAGLE-3, {mode}"
        return (plain, *stock) if row.draft else stock

    def equal_texts(self, row: Row) -> str:
        """How many texts equal the reference's; empty where there is none."""
        texts, wanted = self.rows[row.name].get("texts"), self.reference(row)
        if not texts or not wanted:
            return ""
        return f"{sum(map(str.__eq__, texts, wanted))}/{len(wanted)}"

    def as_transformers(self, row: Row) -> str:
        """How many texts equal transformers' greedy ones."""
        about = self.rows[row.name]["about"]
        wanted = about.get("texts", {}).get(row.dtype or about.get("dtype"), ())
        texts = self.rows[row.name].get("texts", ())
        return f"{sum(map(str.__eq__, texts, wanted))}/{len(wanted)}"


def markdown(lines: Iterable[Line]) -> tuple[str, bool]:
    """The tables, and whether everything in them is as it must be."""
    found = Found(lines)
    known = [row for row in rows(cuda=True) if row.name in found.rows]
    bad = [row.name for row in known if not found.rows[row.name]["good"]]
    parts = [_about(found), _tools(found), _counts(found, known, bad), _plain(found, known, bad)]
    parts += [_states(found, known, bad), _errors(found, known, bad), _cost(found)]
    parts += [_doctor(found)]
    tools_good = all(line["exit_code"] == 0 for line in found.tools.values())
    if bad:
        parts.append("Not as it must be: " + "; ".join(dict.fromkeys(bad)) + ".")
    return "\n\n".join(part for part in parts if part) + "\n", tools_good and not bad


def _about(found: Found) -> str:
    about = found.about
    if not about:
        return ""
    releases = {line["vllm"] for line in found.rows.values() if line.get("vllm")}
    early = ", ".join(f"{name} after {steps}" for name, steps in about["early_steps"].items())
    return (
        f"vLLM {' and '.join(sorted(releases)) or '?'}, {about['device']}, torch {about['torch']}, "
        f"transformers {about['transformers']}; {about['prompts']} prompts, {about['dtype']} where "
        f"nothing else is said, attention: {about['attention']}. Early draft models, in steps: "
        f"{early}."
    )


def _tools(found: Found) -> str:
    told = []
    for (name, variant), line in found.tools.items():
        options = " ".join([name, *line.get("options", ())])
        changed = line.get("changed")
        files = f", {len(changed)} files changed" if changed else ""
        told.append(f"`{options}` ({variant}): exit code {line['exit_code']}{files}")
    return "; ".join(told) + "." if told else ""


def _table(headings: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    if not lines:
        return ""
    head = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*head, *(f"| {' | '.join(map(str, line))} |" for line in lines)])


def _counts(found: Found, known: Sequence[Row], bad: list[str]) -> str:
    lines = []
    for row in known:
        counted = found.rows[row.name].get("counts")
        if not row.draft or row.error or row.kind == "states" or not counted:
            continue
        measured, simulated = Counts(**counted), found.simulated(row)
        lines.append(_count_line(found, row, measured, simulated, bad))
    headings = ["row", "ids used", "drafts", "accepted", "per position", "simulated"]
    headings += ["difference", "largest gap", "nearest other ids", "texts as without"]
    return _table(headings, lines)


def _count_line(
    found: Found,
    row: Row,
    measured: Counts,
    simulated: Mapping[tuple[int, ...], Counts],
    bad: list[str],
) -> list[object]:
    texts = found.equal_texts(row)
    expected = simulated.get(row.boundaries)
    shares = (f"{n / max(measured.drafts, 1):.3f}" for n in measured.accepted_per_position)
    cells: list[object] = [row.name, row.boundaries, measured.drafts, measured.accepted]
    cells.append(" ".join(shares))
    if expected is None:
        bad.append(row.name)
        return [*cells, "-", "-", "-", "-", texts]
    gap = largest_gap(measured, expected)
    others = {
        ids: largest_gap(measured, counts)
        for ids, counts in simulated.items()
        if ids != row.boundaries
    }
    nearest = min(others, key=others.__getitem__)
    whole = f"{found.about['prompts']}/{found.about['prompts']}"
    if gap > TOLERANCE or texts not in ("", whole):
        bad.append(row.name)
    cells += [f"{expected.drafts}, {expected.accepted}", difference(measured, expected)]
    return [*cells, f"{gap:.2%}", f"{nearest}: {others[nearest]:.1%}", texts or "-"]


def _plain(found: Found, known: Sequence[Row], bad: list[str]) -> str:
    lines = []
    for row in known:
        if row.draft or row.kind != "generate" or not found.rows[row.name]["good"]:
            continue
        as_transformers, equal = found.as_transformers(row), found.equal_texts(row)
        whole = f"{found.about.get('prompts')}/{found.about.get('prompts')}"
        if equal not in ("", whole):
            bad.append(row.name)
        lines.append([row.name, as_transformers, equal or "-"])
    return _table(["without EAGLE-3", "texts as transformers'", "texts as unpatched"], lines)


def _states(found: Found, known: Sequence[Row], bad: list[str]) -> str:
    lines = []
    for row in known:
        states = found.rows[row.name].get("states")
        if not states:
            continue
        as_wanted = states["nearest" if row.mode == "graphs" else "identical"]
        if not as_wanted == states["tensors"] > 0:
            bad.append(row.name)
        cells = [row.name, states["forwards"], states["without_python"], states["tensors"]]
        cells += [states["identical"], states["nearest"]]
        cells += [f"{states[name]:.2g}" for name in ("median_difference", "largest_difference")]
        lines.append([*cells, f"{states['least_to_others']:.2g}", found.equal_texts(row) or "-"])
    headings = ["states", "forwards", "of them without Python", "tensors", "identical"]
    headings += ["nearest to their own boundary", "median difference", "largest difference"]
    headings += ["least to another boundary", "texts as without"]
    return _table(headings, lines)


def _errors(found: Found, known: Sequence[Row], bad: list[str]) -> str:
    lines = []
    for row in known:
        line = found.rows[row.name]
        if "said" in line:
            lines.append([row.name, f"`{line['said']}`", "as it must be"])
        elif "problem" in line:
            lines.append([row.name, f"`{line['problem']}`", "**not** as it must be"])
    return _table(["row that ended with an error", "what it said", ""], lines)


def _cost(found: Found) -> str:
    line = found.rows.get("cost", {})
    told = [
        f"{mode}: {one['ratio']:.3f} (slowest / quickest unpatched round: {one['spread']:.3f})"
        for mode, one in line.get("cost", {}).items()
    ]
    if not told:
        return ""
    return (
        f"Cost with EAGLE-3 off, patched / unpatched, medians of {line['rounds']} rounds in turn: "
        f"{'; '.join(told)}."
    )


def _doctor(found: Found) -> str:
    names = {row.slug: row.name for row in rows(cuda=True)}
    return "\n\n".join(
        f"`doctor --metrics` on the scrape of *{names.get(slug, slug)}* (exit code "
        f"{line['exit_code']}):\n\n```\n{line['text'].strip()}\n```"
        for slug, line in found.doctor.items()
    )


def put(document: str, name: str, text: str) -> str:
    """Put a text between the two comments that bear a name.

    Raises:
        ValueError: The comments are not there.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in document or end not in document:
        raise ValueError(f"no place for {name}")
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of results, or write them into the README.

    Returns:
        1 if anything is not as it must be.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance.report", description=__doc__
    )
    parser.add_argument("results", type=Path, nargs="+", help="of one release, in their order")
    parser.add_argument(
        "--write", metavar="NAME", help="between the README's comments of this name"
    )
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    text, good = markdown([line for path in options.results for line in read(path)])
    if options.write:
        document = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(put(document, options.write, text), encoding="utf-8")
    else:
        print(text)
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
