"""Forwards that are nearly vLLM's: refused by name, or patched and right when they are run."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from typing import NamedTuple

import pytest

from forward_runs import difference
from tools.fetch_release import fetch
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.errors import AnchorNotFoundError
from vllm_eagle3_patch.patches.aux_layer_bounds import AuxLayerBounds
from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2
from vllm_eagle3_patch.vllm_source.paths import DEEPSEEK, INTERFACES

INNER, OUTER = "DeepseekV2Model", "DeepseekV2ForCausalLM"
SPARSE = ("DeepseekV32Model", "DeepseekV32ForCausalLM")


class Source(NamedTuple):
    """A file of a release, what patches it, and its two classes."""

    release: str
    patch: Patch
    path: str = DEEPSEEK
    inner: str = INNER
    outer: str = OUTER


NVIDIA = "vllm/models/deepseek_v32/nvidia/model.py"

SOURCES = {
    "0.17.1": Source("0.17.1", DeepseekV2()),
    "0.33.0": Source("0.33.0", AuxLayerBounds()),
    "0.33.0 nvidia": Source(
        "0.33.0", AuxLayerBounds(), "vllm/models/deepseek_v32/nvidia/model.py", *SPARSE
    ),
}

Edit = tuple[str, str]

BEFORE_LOOP = r"(?m)^( {8})(?=for )"
CALL = r"(?m)^( +)(?=hidden_states, residual = layer\()"
AFTER_CALL = r"(?m)^( +)(hidden_states, residual = layer\([^)]*\)\n)"
LOOP = r"(?ms)^ {8}for .*?\n(?= {0,8}[^\s)])"
NORM = r"(?m)^( +)(hidden_states, _ = (?:self\.norm|fused_allreduce_rms_norm)\([^)]*\)\n)"
STAGE = r"(?m)^( {8})(?=if not get_pp_group\(\)\.is_last_rank)"
RETURN = r"(?m)^( {8})return hidden_states$"


def above(place: str, statement: str) -> Edit:
    """Statements put above a place."""
    lines = statement.splitlines()
    return place, "".join(rf"\g<1>{line}\n" for line in lines) + r"\g<1>"


def below(place: str, statement: str) -> Edit:
    """Statements put below a statement."""
    lines = statement.splitlines()
    return place, r"\g<1>\g<2>" + "".join(rf"\g<1>{line}\n" for line in lines)


NAMES_OF_OURS: dict[str, list[Edit]] = {
    "a counter of the fork's own": [
        above(BEFORE_LOOP, "layer_id = 100"),
        below(AFTER_CALL, "layer_id += 1"),
        (RETURN, r"\g<1>return hidden_states if layer_id > 100 else None"),
    ],
    "a name of ours before the loop": [
        above(BEFORE_LOOP, "layer_id = 100"),
        above(RETURN, "assert layer_id == 100"),
    ],
    "a parameter of our name": [("intermediate_tensors:", "layer_id, intermediate_tensors:")],
}

NEAR_MISSES: dict[str, list[Edit]] = {
    "break": [above(CALL, "if layer is self.layers[5]:\n    break")],
    "break after the layer": [below(AFTER_CALL, "if layer is self.layers[5]:\n    break")],
    "continue": [above(CALL, "if layer is self.layers[5]:\n    continue")],
    "return in the loop": [above(CALL, "if layer is self.layers[5]:\n    return hidden_states")],
    "return before the loop": [
        above(BEFORE_LOOP, "if residual is None:\n    return hidden_states")
    ],
    "return after the loop": [above(STAGE, "if residual is not None:\n    return hidden_states")],
    "a slice after the norm": [below(NORM, "hidden_states = hidden_states[:2]")],
    "a gather after the norm": [below(NORM, "hidden_states = hidden_states + hidden_states")],
    "a slice that is returned": [(RETURN, r"\g<1>return hidden_states[:2]")],
    "a slice after the loop": [
        above(STAGE, "hidden_states, residual = hidden_states[:2], residual[:2]")
    ],
    "a layer fed by another variable": [
        above(CALL, "fed = hidden_states + hidden_states"),
        (r"positions, hidden_states, residual", "positions, fed, residual"),
    ],
    "a layer without the residual": [
        (r"positions, hidden_states, residual", "positions, hidden_states, None")
    ],
    "states changed before a layer": [above(CALL, "hidden_states = hidden_states + hidden_states")],
    "states changed in place before a layer": [above(CALL, "hidden_states.add_(hidden_states)")],
    "states changed in place after the loop": [above(STAGE, "hidden_states.add_(hidden_states)")],
    "states changed after a layer": [
        below(AFTER_CALL, "hidden_states = hidden_states + hidden_states")
    ],
    "states bound within the call": [
        (r"positions, hidden_states, residual", "positions, hidden_states, residual, (a := 1)"),
    ],
    "the layer called under a condition": [
        (AFTER_CALL, r"\g<1>if layer is not self.layers[5]:\n\g<1>    \g<2>")
    ],
    "the layer called within try": [
        (AFTER_CALL, r"\g<1>try:\n\g<1>    \g<2>\g<1>finally:\n\g<1>    pass\n")
    ],
    "an else of the loop": [above(STAGE, "else:\n    hidden_states = hidden_states[:2]")],
    "a loop through other layers": [
        (r"self\.layers, self\.start", "self.layers[::-1], self.start")
    ],
    "a norm fed by another variable": [
        (r"norm\(\s*hidden_states, residual", "norm(hidden_states + hidden_states, residual")
    ],
    "a stage that is the last one": [
        (r"if not get_pp_group\(\)\.is_last", "if get_pp_group().is_last")
    ],
    "a stage that returns at once": [
        (r"if not get_pp_group\(\)\.is_last_rank", "if not get_pp_group().is_last_rank or 1")
    ],
    "layers replaced": [above(BEFORE_LOOP, "self.end_layer = self.end_layer - 1")],
    "a decorator": [(r"    def forward\(", "    @property\n    def forward(")],
}

CORRECT: dict[str, list[Edit]] = {
    "a comment": [above(CALL, "# every layer")],
    "a renamed argument": [(r"\bpositions\b(?!=)", "token_positions")],
    "another call argument": [
        (r"(positions, hidden_states, residual)", r"\g<1>, more=None"),
        (r"more=None, (\w+)", r"\g<1>, more=None"),
    ],
    "a with around the loop": [],
}


@cache
def content(source: Source) -> str:
    return (fetch(source.release) / source.path).read_text()


def edited(source: Source, edits: list[Edit], owner: str | None = None) -> bytes:
    """The file with the forward of one class changed; every edit finds its place."""
    text = content(source)
    start = text.index("    def forward(", text.index(f"\nclass {owner or source.inner}("))
    end = re.compile(r"\n(?=    def |    @|\S)").search(text, start + 10)
    assert end is not None
    forward = text[start : end.start()] + "\n"
    for pattern, new in edits:
        forward, found = re.subn(pattern, new, forward)
        assert found or new.endswith("more=None"), pattern
    return f"{text[:start]}{forward}{text[end.start() + 1 :]}".encode()


def within(source: Source) -> bytes:
    """The loop of a forward under a ``with``."""
    text = edited(source, []).decode()
    start = text.index(f"\nclass {source.inner}(")
    loop = re.compile(LOOP).search(text, start)
    assert loop is not None
    block = textwrap.indent(loop[0], "    ")
    text = f"{text[: loop.start()]}        with nullcontext():\n{block}{text[loop.end() :]}"
    return text.replace("from itertools import islice\n", IMPORTS, 1).encode()


IMPORTS = "from contextlib import nullcontext\nfrom itertools import islice\n"


def ran_right(source: Source, before: bytes, after: bytes) -> str | None:
    root = fetch(source.release)
    extra = [(root / INTERFACES).read_bytes()]
    if source.path != DEEPSEEK:
        extra.append(AuxLayerBounds().apply((root / DEEPSEEK).read_bytes(), DEEPSEEK))
    return difference(before, after, source.inner, source.outer, tuple(extra))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("edits", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_a_near_miss_is_refused_by_name(source: Source, edits: list[Edit]) -> None:
    refused_by_name(source, edits)


@pytest.mark.parametrize("edits", NAMES_OF_OURS.values(), ids=NAMES_OF_OURS)
def test_a_name_that_would_be_overwritten_is_refused(edits: list[Edit]) -> None:
    refused_by_name(SOURCES["0.17.1"], edits)


def refused_by_name(source: Source, edits: list[Edit]) -> None:
    before = edited(source, edits)
    compile(before, "forward", "exec", dont_inherit=True)
    with pytest.raises(AnchorNotFoundError) as refused:
        after = source.patch.apply(before, source.path)
        pytest.fail(ran_right(source, before, after) or "accepted, and right")
    assert refused.value.where in refused.value.message


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("kind", ["as published", *CORRECT])
def test_a_correct_rewrite_is_patched_and_right(source: Source, kind: str) -> None:
    before = within(source) if "with" in kind else edited(source, CORRECT.get(kind, []))
    after = source.patch.apply(before, source.path)
    assert ran_right(source, before, after) is None


def test_a_slice_of_what_the_inner_model_returns_is_refused() -> None:
    source = SOURCES["0.17.1"]
    slices = [(r"return hidden_states", "return hidden_states[:2]")]
    with pytest.raises(AnchorNotFoundError, match=r"hidden_states\[:2\]"):
        source.patch.apply(edited(source, slices, OUTER), DEEPSEEK)
