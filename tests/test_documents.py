"""README.md and its like: generated parts are current, and what is promised is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import write_readme
from vllm_eagle3_patch.cli import cli
from vllm_eagle3_patch.completion import patch_names

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
