"""The codemods on sources that are nearly, or not at all, what they know.

``VLLM_EAGLE3_PATCH_FUZZ=long`` looks for minutes, at random; by default the same few hundred
sources are tried each time.
"""

from __future__ import annotations

import difflib
import os
import re

import aux_layer_bounds_sources
import pytest
from aux_layer_bounds_sources import BEFORE as BOUNDS
from aux_layer_bounds_sources import SPARSE_BEFORE
from aux_layer_ids_sources import CONFIG, LATER_CONFIG, NEWER_RUNNER, OLD_RUNNER, RUNNER
from deepseek_v2_sources import BEFORE as DEEPSEEK
from deepseek_v2_sources import SLICED_BEFORE
from draft_attention_backend_sources import ARGUMENT, ENVIRONMENT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kimi_k25_sources import BARE_BEFORE
from kimi_k25_sources import BEFORE as KIMI

import fake_vllm
from forward_runs import difference
from safety_table import Tried
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground.errors import PatchError, UnsupportedError, VerificationError
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.vllm_source.sources import parse

LONG = os.environ.get("VLLM_EAGLE3_PATCH_FUZZ") == "long"
EXAMPLES = 3000 if LONG else 25

V32 = "vllm/models/deepseek_v32/nvidia/model.py"
SOURCES = (
    *(("vllm/model_executor/models/deepseek_v2.py", s) for s in (DEEPSEEK, SLICED_BEFORE, BOUNDS)),
    (V32, SPARSE_BEFORE),
    *(("vllm/model_executor/models/kimi_k25.py", source) for source in (KIMI, BARE_BEFORE)),
    *(("vllm/config/speculative.py", s) for s in (CONFIG, LATER_CONFIG, fake_vllm.CONFIG)),
    *(("vllm/v1/worker/gpu_model_runner.py", source) for source in (RUNNER, OLD_RUNNER)),
    ("vllm/v1/worker/gpu/spec_decode/eagle3_utils.py", NEWER_RUNNER),
    *(("vllm/v1/attention/selector.py", source) for source in (ARGUMENT, ENVIRONMENT)),
    ("vllm/v1/spec_decode/eagle.py", fake_vllm.PROPOSER),
)
# The two classes of a file whose forwards are run, and what its bases are in.
COLLECTING = {
    "vllm/model_executor/models/deepseek_v2.py": ("DeepseekV2Model", "DeepseekV2ForCausalLM", ()),
    V32: (
        "DeepseekV32Model",
        "DeepseekV32ForCausalLM",
        (aux_layer_bounds_sources.AFTER.encode(),),
    ),
}
WORDS = re.compile(r"[A-Za-z_]\w*")
CONDITIONS = ("if True:", "for _ in (1,):", "try:", "with a:", "class Inner:", "def inner(self):")


@st.composite
def mutated(draw: st.DrawFn, source: str) -> str:
    """A source with one to four lines or names changed."""
    for _ in range(draw(st.integers(1, 4))):
        lines = source.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        other = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        kind = draw(st.integers(0, 9))
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, line)
        elif kind == 2:
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 3:
            lines.insert(at, indent + draw(st.sampled_from(["# a comment", "@decorator", "pass"])))
        elif kind == 4:
            lines[at] = line + draw(st.sampled_from(["  # beside", " ", "\t", ";", "; pass", "\f"]))
        elif kind == 5:
            lines[at : at + 1] = [indent + draw(st.sampled_from(CONDITIONS)), "    " + line]
        elif kind == 6:
            lines[at] = line.replace("(self, ", "(self, *, more=None, ", 1)
        elif kind == 7:
            end = min(len(lines), at + draw(st.integers(1, 8)))
            lines[other:other] = lines[at:end]
        elif kind == 8:
            lines[at] = line.replace(" = ", draw(st.sampled_from([": int = ", " += ", " = b = "])))
        else:
            names = WORDS.findall(line)
            if names:
                lines[at] = line.replace(
                    draw(st.sampled_from(names)),
                    draw(
                        st.sampled_from(
                            [
                                "other",
                                "hidden_states",
                                "residual",
                                "layer",
                                "self",
                                "aux_hidden_states",
                            ]
                        )
                    ),
                    1,
                )
        source = "\n".join(lines)
    return source


LAYOUTS = (
    str.encode,
    lambda source: source.replace("\n", "\r\n").encode(),
    lambda source: b"\xef\xbb\xbf" + source.encode(),
    lambda source: source.rstrip("\n").encode(),
    lambda source: source.replace("    ", "\t").encode(),
)


def outcome(patch: Patch, content: bytes, path: str) -> str:
    """How a patch ended; what it made of the content is held against what it promises."""
    try:
        result = patch.apply(content, path)
    except (UnsupportedError, VerificationError) as error:
        assert "\n" not in error.message + error.hint
        return "refused"
    if result == content:
        return "unchanged"
    assert patch.holds(parse(result, path), path=path)
    assert patch.apply(result, path) == result
    assert untouched(content, result)
    if path in COLLECTING:
        assert difference(content, result, *COLLECTING[path]) is None
    return "patched"


def untouched(before: bytes, after: bytes) -> bool:
    """Whether every line is still there in its order, but for a few that a marker is above."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    gone = sum(last - first for tag, first, last, _, _ in matcher.get_opcodes() if tag != "equal")
    return gone <= 12 and b"vllm-eagle3-patch: " in after


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.name)
def test_a_source_that_was_changed_anyhow_is_patched_whole_or_refused(
    patch: Patch, tried: Tried
) -> None:
    outcomes: list[str] = []

    @settings(
        derandomize=not LONG,
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        path, source = data.draw(st.sampled_from(SOURCES))
        layout = data.draw(st.sampled_from(LAYOUTS))
        content = layout(data.draw(mutated(source)))
        outcomes.append(outcome(patch, content, path))

    fuzz()
    assert set(outcomes) <= {"refused", "unchanged", "patched"}
    tried(
        "Fuzzing",
        "sources with lines and names removed, doubled, swapped, nested or renamed",
        how="each patch, on our look-alikes of vLLM's files, in five layouts",
        count=len(outcomes),
        result="refused by name, or patched whole: the result parses, holds, and stays as it is; "
        "a forward returns what it did, and its states are right",
    )


DEEP = {
    "sums": "x = " + "1 + " * 1500 + "1\n",
    "conditions": "x = " + "a and b or " * 20000 + "c\n",
    "attributes": "x = a" + ".b" * 1500 + "\n",
    "branches": "if a:\n    pass\n" + "elif a:\n    pass\n" * 1500,
    "strings": "x = " + "'a' " * 5000 + "\n",
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_source_nested_too_deeply_is_refused(kind: str, tried: Tried) -> None:
    # In a child: what this guards against ends the process.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            (patch,) = (patch for patch in all_patches() if patch.name == "deepseek-v2")
            patch.apply((DEEPSEEK + DEEP[kind]).encode(), "vllm/x.py")
        except PatchError as error:
            code = 0 if error.code == "not-python" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tried(
        "Fuzzing",
        "a source nested too deeply",
        how="sums, conditions, attributes, branches or strings by the thousand",
        result="refused; the process lives",
    )
