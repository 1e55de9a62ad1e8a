"""The compatibility matrix: a row a release, a column a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.ground.matrix import Release
from vllm_eagle3_patch.output.blocks import BLANK, Block, Columns, Line, print_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_SHORT = {
    "DeepseekV2ForCausalLM": "V2",
    "DeepseekV3ForCausalLM": "V3,K2",
    "DeepseekV32ForCausalLM": "V3.2",
    "GlmMoeDsaForCausalLM": "GLM",
    "MistralLarge3ForCausalLM": "ML3",
    "KimiK25ForConditionalGeneration": "K2.5",
    "KimiVLForConditionalGeneration": "KimiVL",
    "DeepseekVLV2ForCausalLM": "VL2",
    "DeepseekOCRForCausalLM": "OCR",
    "DeepseekOCR2ForCausalLM": "OCR2",
    "UnlimitedOCRForCausalLM": "UOCR",
    "PixtralForConditionalGeneration": "ML3-VL",
    "Dots3NoteForCausalLM": "Dots3",
}


_SHORTEST = ("V2", "V3", "32", "GLM", "ML", "K2", "KV", "VL", "O", "O2", "UO", "MV", "D3")
"""The same columns for a terminal that is too narrow, where cells are first letters."""


_CELLS = {"native": "native", "patch": "patch", "interface": "iface", "unsupported": "no"}


def print_matrix(releases: Sequence[Release]) -> None:
    """A row a release, a column a model."""
    print_blocks(_matrix_blocks(releases))


def print_release(release: Release) -> None:
    """One release: its models, and its files with their pins."""
    print_blocks(_release_blocks(release))


def _matrix_blocks(releases: Sequence[Release]) -> Iterator[Block]:
    reasons: dict[str, list[str]] = {}
    rows = []
    for release in releases:
        support = {model.architecture: _CELLS[model.support] for model in release.models}
        rows.append((release.name, *(support.get(name, "-") for name in _SHORT)))
        for model in release.models:
            if model.reason is not None:
                reasons.setdefault(model.reason, []).append(release.name)
    letters = tuple((name, *(cell[:1] for cell in cells)) for name, *cells in rows)
    narrow = Columns(("release", *_SHORTEST), letters)
    yield Columns(("release", *_SHORT.values()), tuple(rows), narrow)
    yield BLANK
    yield Line(f"columns: {', '.join(_SHORT)}")
    yield Line("native: vLLM has it. patch: apply makes it work. -: not shipped.")
    yield Line(
        "iface: the interface can be added (--interface-only), but the engine cannot use it."
    )
    for reason, names in reasons.items():
        first, last = names[0], names[-1]
        yield Line(f"{first} to {last}: {reason}" if first != last else f"{first}: {reason}")


def _release_blocks(release: Release) -> Iterator[Block]:
    yield Line(f"vLLM {release.name}: {release.support}", bold=True)
    yield Columns(
        ("model", "support", "patches", "limits once ready"),
        tuple(
            (
                model.architecture,
                model.support,
                ", ".join(model.missing) or "-",
                ", ".join(model.limits_patched) or "-",
            )
            for model in release.models
        ),
    )
    for reason in dict.fromkeys(model.reason for model in release.models if model.reason):
        yield Line(f"reason: {reason}")
    yield BLANK
    yield Columns(
        ("file", "sha256 as published", "sha256 patched"),
        tuple(
            (path, pin.original, pin.patched if pin.patched != pin.original else "unchanged")
            for path, pin in release.files.items()
        ),
    )
