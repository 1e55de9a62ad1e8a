"""Builds that are not on the index: five realistic variants of a release, and five hostile ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import run, snapshot
from semantics import Subject, check_all

MODELS = "vllm/model_executor/models"
DEEPSEEK = f"{MODELS}/deepseek_v2.py"
INTERFACES = f"{MODELS}/interfaces.py"
SPECULATIVE = "vllm/config/speculative.py"
LOOP = "        for layer in islice(self.layers, self.start_layer, self.end_layer):\n"
CALL = "positions, hidden_states, residual, llama_4_scaling"
NORM = "        hidden_states, _ = self.norm(hidden_states, residual)\n"

Change = Callable[[str], str]


def replacing(old: str, new: str) -> Change:
    """A change of the one place where a text stands."""

    def change(source: str) -> str:
        assert source.count(old) == 1, (source.count(old), old)
        return source.replace(old, new)

    return change


def lines_moved(source: str) -> str:
    """A function before everything else that the module defines, and comments in between."""
    helper = "\n\ndef describe(layer):\n    return type(layer).__name__\n"
    moved = source.replace("\n\nclass DeepseekAttention", f"{helper}\n\nclass DeepseekAttention", 1)
    return moved.replace(LOOP, f"        # every layer of this stage\n\n{LOOP}", 1)


def annotations_changed(source: str) -> str:
    """The forward of the inner model without and with other annotations."""
    start = source.index("class DeepseekV2Model(")
    forward = source.index("    def forward(", start)
    end = source.index("        if get_pp_group()", forward)
    other = re.sub(r"torch\.Tensor \| None", '"torch.Tensor | None"', source[forward:end])
    return (
        source[:forward]
        + other.replace(" -> torch.Tensor | IntermediateTensors", "")
        + source[end:]
    )


REALISTIC: dict[str, Change] = {
    "lines moved": lines_moved,
    "another base class": replacing(
        "    nn.Module, SupportsPP, DeepseekV2MixtureOfExperts, SupportsLoRA, SupportsEagle\n",
        "    nn.Module,\n    SupportsPP,\n    DeepseekV2MixtureOfExperts,\n    SupportsLoRA,\n"
        "    SupportsEagle,\n    Reloadable,\n",
    ),
    "loop reformatted": replacing(
        LOOP,
        "        for layer in islice(\n            self.layers,\n            self.start_layer,\n"
        "            self.end_layer,\n        ):\n",
    ),
    "a new argument to the layer call": replacing(CALL, f"{CALL}, self.config"),
    "type annotations changed": annotations_changed,
}


@pytest.mark.parametrize("variant", REALISTIC)
def test_realistic_variant_is_patched_with_unpinned(variant: str, site_packages: Path) -> None:
    rebuilt(site_packages, DEEPSEEK, REALISTIC[variant])
    before = snapshot(site_packages)
    here = ("--site-packages", site_packages)
    assert run("check", *here).exit_code == 4
    assert run("apply", *here).exit_code == 4
    assert run("check", *here, "--unpinned").exit_code == 1
    assert run("apply", *here, "--unpinned").exit_code == 0
    assert {m["ground"] for m in run("check", *here, "--json").document["models"]} >= {"unproven"}
    patched = (site_packages / DEEPSEEK).read_bytes()
    if variant != "another base class":
        assert set(check_all(Subject(patched)).values()) == {"ok"}
    assert run("revert", *here).exit_code == 0
    assert snapshot(site_packages) == before


def class_split(source: str) -> str:
    """The forward moved to a base class of the model."""
    start = source.index("    def forward(", source.index("class DeepseekV2Model("))
    end = source.index("\n\nclass DeepseekV2MixtureOfExperts")
    base = f"class DeepseekV2Forward(nn.Module):\n{source[start:end]}\n\n\n"
    decorated = source.rindex("@support_torch_compile", 0, source.index("class DeepseekV2Model("))
    inner = source[decorated:start].replace("(nn.Module)", "(DeepseekV2Forward)")
    return source[:decorated] + base + inner.rstrip() + "\n" + source[end:]


HOSTILE: dict[str, tuple[str, Change, str]] = {
    "two loops": (
        DEEPSEEK,
        replacing(NORM, f"{LOOP}            layer.finish()\n{NORM}"),
        "one loop in DeepseekV2Model.forward",
    ),
    "the loop renamed": (
        DEEPSEEK,
        replacing(LOOP, LOOP.replace("for layer in", "for block in")),
        "for layer in islice(self.layers, self.start_layer, self.end_layer)",
    ),
    "the class split": (DEEPSEEK, class_split, "runs the forward of DeepseekV2Forward"),
    "the protocol renamed": (
        INTERFACES,
        replacing("class SupportsEagle3(", "class SupportsEagleThree("),
        "class SupportsEagle3",
    ),
    "half done by hand": (
        DEEPSEEK,
        replacing(NORM, f"        aux_hidden_states = [hidden_states + residual]\n{NORM}"),
        "class DeepseekV2Model without aux_hidden_states",
    ),
}


@pytest.mark.parametrize("variant", HOSTILE)
def test_hostile_variant_is_refused_with_the_anchor(variant: str, site_packages: Path) -> None:
    path, change, anchor = HOSTILE[variant]
    rebuilt(site_packages, path, change)
    before = snapshot(site_packages)
    for command in ("check", "apply"):
        ended = run(command, "--site-packages", site_packages, "--unpinned", "--json")
        assert ended.exit_code == 4
        code = "unsupported" if variant == "the class split" else "anchor-missing"
        problems = [p for p in ended.document["problems"] if p["code"] == code]
        assert problems
        assert all(anchor in problem["message"] for problem in problems)
        assert all(path in problem["message"] for problem in problems)
    assert snapshot(site_packages) == before


def patched_by_hand(source: str) -> str:
    """DeepSeek-V2 as people patch it by hand, after vLLM's own change."""
    changes = (
        replacing(
            "SupportsEagle, SupportsLoRA, SupportsPP\n",
            "SupportsEagle, SupportsEagle3, SupportsLoRA, SupportsPP\n",
        ),
        replacing(
            "DeepseekV2MixtureOfExperts, SupportsLoRA, SupportsEagle\n):",
            "DeepseekV2MixtureOfExperts, SupportsLoRA, SupportsEagle, SupportsEagle3\n):",
        ),
        replacing(
            "    def set_moe_parameters(self):\n",
            "    def set_aux_hidden_state_layers(self, layers):\n"
            "        self.model.aux_hidden_state_layers = layers\n\n"
            "    def get_eagle3_aux_hidden_state_layers(self):\n"
            "        n = len(self.model.layers)\n"
            "        return (2, n // 2, n - 3)\n\n"
            "    def set_moe_parameters(self):\n",
        ),
        replacing(
            '["hidden_states", "residual"], config.hidden_size\n        )\n',
            '["hidden_states", "residual"], config.hidden_size\n        )\n'
            "        self.aux_hidden_state_layers = ()\n",
        ),
        replacing(
            LOOP,
            "        aux_hidden_states = []\n"
            "        for idx, layer in enumerate(\n"
            "            islice(self.layers, self.start_layer, self.end_layer),\n"
            "            start=self.start_layer,\n"
            "        ):\n"
            "            if idx in self.aux_hidden_state_layers:\n"
            "                aux_hidden_states.append(hidden_states + residual)\n",
        ),
        replacing(
            f"{NORM}        return hidden_states\n",
            f"{NORM}        if len(aux_hidden_states) > 0:\n"
            "            return hidden_states, aux_hidden_states\n"
            "        return hidden_states\n",
        ),
    )
    for change in changes:
        source = change(source)
    return source


def test_patched_by_hand_in_the_usual_way_is_ready_and_not_patched_twice(
    site_packages: Path,
) -> None:
    for path, change in (
        (DEEPSEEK, patched_by_hand),
        (
            SPECULATIVE,
            replacing('"nemotron_h",\n', '"nemotron_h",\n            "deepseek_v3", "kimi_k2",\n'),
        ),
    ):
        file = site_packages / path
        file.write_text(change(file.read_text()))
    before = snapshot(site_packages)
    here = ("--site-packages", site_packages, "--model", "deepseek_v3", "--json")
    ended = run("check", *here)
    assert ended.exit_code == 1
    assert ended.document["state"] == "modified"
    assert "unproven" in {problem["code"] for problem in ended.document["problems"]}
    ready = {m["architecture"] for m in ended.document["models"] if m["ready"]}
    assert "DeepseekV3ForCausalLM" in ready
    assert run("apply", "--site-packages", site_packages, "--only", "deepseek-v2").exit_code == 0
    assert snapshot(site_packages) == before


def rebuilt(site_packages: Path, path: str, change: Change) -> None:
    """Make it another build: the file is changed, and RECORD has it as it is now."""
    file = site_packages / path
    file.write_text(change(file.read_text()))
    (record,) = site_packages.glob("*.dist-info/RECORD")
    rows = record.read_text().splitlines(keepends=True)
    record.write_text("".join(row for row in rows if not row.startswith(path)))
