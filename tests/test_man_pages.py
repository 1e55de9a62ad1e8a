"""``docs/man``: one page for the program and each command, as ``--help`` says, and sound."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tools import write_man_pages
from tools.write_man_pages import FOLDER
from vllm_eagle3_patch.cli.program import cli

PAGES = write_man_pages.pages()


def test_the_pages_are_current() -> None:
    current = {page.name: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.1")}
    assert current == PAGES, "run make docs"


def test_every_command_has_examples_and_a_page() -> None:
    for name, command in cli.commands.items():
        page = PAGES[f"vllm-eagle3-patch-{name}.1"]
        assert command.epilog, name
        assert (command.epilog.splitlines()[-1].strip().replace("-", "\\-")[:40]) in page


@pytest.mark.parametrize("name", PAGES)
def test_groff_has_nothing_to_say(name: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("no groff on this machine")
    command = ["groff", "-ww", "-man", "-Tutf8", "-z", str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
