"""The patch, broken on purpose in the ways that matter: the proofs must then fail."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = "vllm/model_executor/models/deepseek_v2.py"

MODULE = "vllm.model_executor.models.deepseek_v2"

CAPTURE = """\
            # vllm-eagle3-patch: deepseek-v2
            if layer_id in self.aux_hidden_state_layers:
                aux_hidden_states.append(
                    hidden_states.clone() if residual is None else hidden_states + residual
                )
"""


class Mutation(NamedTuple):
    """One way to break it.

    Attributes:
        name: What is wrong then.
        proof: What notices: ``states``, ``verify`` or ``compile_cache``.
    """

    name: str
    proof: str


AFTER = Mutation("captured after the layer instead of before", "states")
ALIAS = Mutation("an alias instead of a copy", "verify")
SHIFTED = Mutation("ids shifted by one", "states")
KEY = Mutation("ids left out of the compile-cache key", "compile_cache")
MUTATIONS = (AFTER, ALIAS, SHIFTED, KEY)


def mutate(site_packages: Path, mutation: Mutation) -> dict[Path, bytes]:
    """Break the patched files; returns what was in them."""
    model = site_packages / MODEL
    if mutation is AFTER:
        return _edit(model, _move_behind_layer)
    if mutation is ALIAS:
        return _edit(model, lambda text: text.replace("hidden_states.clone()", "hidden_states"))
    if mutation is SHIFTED:
        shifted = "if layer_id + 1 in self.aux_hidden_state_layers"
        return _edit(
            model, lambda text: text.replace("if layer_id in self.aux_hidden_state_layers", shifted)
        )
    asked = re.compile(r"layer_ids = self\.eagle3_aux_hidden_state_layers\(\).*")
    package = site_packages / "vllm"
    candidates = (package / "config.py", *package.glob("config/*.py"))
    (config,) = (f for f in candidates if f.exists() and asked.search(f.read_text()))
    return _edit(config, lambda text: asked.sub("layer_ids = None", text))


STATE = "hidden_states.clone() if residual is None else hidden_states + residual"
NORM = "        hidden_states, _ = self.norm(hidden_states, residual)\n"


def broken_forwards(site_packages: Path) -> dict[str, str]:
    """The patched model with one usual mistake of a hand-made patch each, by what is wrong.

    Empty where its forward is vLLM's own.
    """
    source = (site_packages / MODEL).read_text()
    if CAPTURE not in source:
        return {}
    test = "if layer_id in self.aux_hidden_state_layers"
    edits = {
        "residual-left-out": (STATE, "hidden_states.clone()"),
        "residual-only": (STATE, "hidden_states.clone() if residual is None else residual.clone()"),
        "never": (test, test.replace("if ", "if False and ")),
        "all-others": (test, test.replace(" in ", " not in ")),
        "shifted": (test, test.replace("layer_id in", "layer_id + 1 in")),
        "no-copy": (STATE, STATE.replace(".clone()", "")),
        "buffer": (STATE, "hidden_states if residual is None else residual.add_(hidden_states)"),
        "sliced": (NORM, f"{NORM}        hidden_states = hidden_states[:3]\n"),
    }
    broken = {name: source.replace(old, new, 1) for name, (old, new) in edits.items()}
    broken["after-the-layer"] = _move_behind_layer(source)
    assert source not in broken.values()
    return broken


def _move_behind_layer(text: str) -> str:
    before, capture, rest = text.partition(CAPTURE)
    lines = rest.splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if line.rstrip().endswith(")")) + 1
    return "".join((before, *lines[:end], capture, *lines[end:]))


def _edit(file: Path, change: Callable[[str], str]) -> dict[Path, bytes]:
    content = file.read_bytes()
    changed = change(content.decode()).encode()
    if changed == content:
        raise AssertionError(f"nothing to break in {file.name}")
    file.unlink()  # It may share its inode with the kept original.
    file.write_bytes(changed)
    return {file: content}
