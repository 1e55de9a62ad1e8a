"""Write the support table of README.md from the matrix."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.family import FAMILY

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- support: written by `make docs` -->"
END = "<!-- end of support -->"

GROUPS = {
    "DeepSeek-V2, V3, R1, Kimi-K2": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    "Kimi-K2.5": ("KimiK25ForConditionalGeneration",),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM",),
    "GLM (DSA)": ("GlmMoeDsaForCausalLM",),
    "Mistral-Large-3": ("MistralLarge3ForCausalLM",),
    "the same with vision": ("PixtralForConditionalGeneration",),
    "Kimi-VL, DeepSeek-VL2": ("KimiVLForConditionalGeneration", "DeepseekVLV2ForCausalLM"),
    "DeepSeek-OCR, OCR 2, Unlimited-OCR": (
        "DeepseekOCRForCausalLM",
        "DeepseekOCR2ForCausalLM",
        "UnlimitedOCRForCausalLM",
    ),
    "Dots3-Note": ("Dots3NoteForCausalLM",),
}
"""A column each: what people call the models, and their architectures."""

WORDS = {"native": "native", "patch": "**patch**", "interface": "interface", "unsupported": "no"}


def table() -> str:
    """The table, in Markdown: a row for each run of releases that are alike."""
    named = [architecture for group in GROUPS.values() for architecture in group]
    assert sorted(named) == sorted(model.architecture for model in FAMILY)
    lines = [f"| vLLM | {' | '.join(GROUPS)} |", f"| --- |{' --- |' * len(GROUPS)}"]
    for cells, group in groupby(matrix.oldest_first(), key=_cells):
        names = [release.name for release in group]
        releases = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"| {releases} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(release: matrix.Release) -> tuple[str, ...]:
    support = {model.architecture: model.support for model in release.models}
    cells = []
    for architectures in GROUPS.values():
        levels = {support[name] for name in architectures if name in support}
        words = [word for level, word in WORDS.items() if level in levels]
        cells.append(" or ".join(words) or "-")
    return tuple(cells)


def document(current: str) -> str:
    """The document with the table as it should be; all else is kept."""
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
