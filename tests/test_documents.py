"""README.md and its like: generated parts are current, and what is promised is there."""

from __future__ import annotations

import ast
import errno
import os
import re
from pathlib import Path

import pytest

from tools import write_readme
from tools.fetch_release import fetch
from vllm_eagle3_patch.cli.completion import patch_names
from vllm_eagle3_patch.cli.program import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_support_table_is_current() -> None:
    assert write_readme.document(README) == README, "run make docs"


def test_every_patch_is_explained() -> None:
    _, _, section = README.partition("## What it changes")
    assert [name for name in patch_names() if f"`{name}`" not in section] == []


def test_options_and_commands_that_are_named_exist() -> None:
    options = {opt for command in cli.commands.values() for p in command.params for opt in p.opts}
    named = set(re.findall(r"`vllm-eagle3-patch ([a-z]+)", README))
    assert named <= {*cli.commands}
    ours = re.findall(r"`(?:apply|revert|check|verify|doctor|diff)((?: --?[a-z][a-z-]*)+)", README)
    for words in ours:
        assert set(words.split()) <= options, words


@pytest.mark.parametrize(("name", "lines"), [("README.md", 260), ("CONTRIBUTING.md", 40)])
def test_it_is_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


IN_VLLM = {
    "is only supported for": ("0.17.1", "vllm/config/speculative.py"),
    "Eagle3 is only supported for": ("0.16.0", "vllm/config/speculative.py"),
    " models. Got self.target_model_config.hf_text_config.model_type=": (
        "0.17.1",
        "vllm/config/speculative.py",
    ),
    "Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested": (
        "0.17.1",
        "vllm/v1/worker/gpu_model_runner.py",
    ),
    "does not support multimodal inputs yet": (
        "0.11.0",
        "vllm/model_executor/models/llama_eagle3.py",
    ),
    "Selected backend": ("0.17.1", "vllm/platforms/cuda.py"),
    "is not valid for this configuration": ("0.17.1", "vllm/platforms/cuda.py"),
    "The page size of the layer is not divisible by the maximum page size": (
        "0.17.1",
        "vllm/v1/core/kv_cache_utils.py",
    ),
    "are not supported for now": ("0.17.1", "vllm/model_executor/models/registry.py"),
}
"""Texts of errors in README.md, and a release and file that has them."""


@pytest.mark.parametrize("text", IN_VLLM)
def test_texts_of_vllm_are_exact(text: str) -> None:
    release, path = IN_VLLM[text]
    assert text in README
    found = spoken((fetch(release) / path).read_text(encoding="utf-8"))
    assert any(text in words for words in found)


def test_our_own_texts_are_exact() -> None:
    _, _, section = README.partition("What this tool says")
    section, _, _ = section.partition("\n## ")
    sources = "vllm_eagle3_patch/**/*.py", "patches/*.py"
    ours = {w for glob in sources for file in ROOT.glob(glob) for w in spoken(file.read_text())}
    ours |= {os.strerror(number) for number in (errno.EACCES, errno.EROFS, errno.ENOSPC)}
    rows = [row for row in section.splitlines() if re.match(r"\| `", row)]
    assert len(rows) > 8
    for row in rows:
        for text in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            code, colon, message = text.partition(": ")
            is_coded = bool(colon) and re.fullmatch(r"[a-z]+(-[a-z]+)*", code) is not None
            assert not is_coded or code in ours, code
            for part in re.split(r"\(?\.\.\.\)?|\d+", message if is_coded else text):
                words = part.strip(" :;(")
                assert any(words in said for said in ours), (text, words)


def spoken(source: str) -> set[str]:
    """Every string of a source; of one with fields in it the text with the fields' ``{name=}``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
            found.update("".join(map(str, parts)).split("\0"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found
