"""``docs/terminal.svg``: what it shows is what the commands print, and it loads nothing."""

from __future__ import annotations

import html
import re
from pathlib import Path
from xml.etree import ElementTree

from tools import write_picture
from tools.write_picture import COMMANDS, PICTURE, WIDTH


def words(svg: str) -> list[str]:
    """Every piece of text of a picture."""
    return [html.unescape(text).replace("\xa0", " ") for text in re.findall(r">([^<>\n]+)<", svg)]


def test_it_is_current(tmp_path: Path) -> None:
    """What the first command prints depends on most of what this tool says."""
    sandbox = tmp_path / "venv"
    write_picture.make_sandbox(sandbox)
    shown = write_picture.normalised(write_picture.run(COMMANDS[0], sandbox), sandbox)
    _, *drawn = words(write_picture.draw(shown))
    current = words(PICTURE.read_text(encoding="utf-8"))
    assert [word for word in drawn if word not in current] == [], "run make docs"


def test_it_loads_nothing_and_is_sound() -> None:
    svg = PICTURE.read_text(encoding="utf-8")
    assert re.findall(r"\w+://[^\"' )]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in svg and "url(" not in svg.replace("url(#", "")
    ElementTree.fromstring(svg)


def test_paths_are_the_same_on_every_machine(tmp_path: Path) -> None:
    sandbox = tmp_path / "venv"
    shown = f"vllm in {sandbox}/lib/python3.10/site-packages/vllm"
    expected = "vllm in /opt/venv/lib/python3.12/site-packages/vllm"
    assert write_picture.normalised(shown, sandbox) == expected


def test_a_line_is_as_wide_as_the_terminal() -> None:
    svg = write_picture.draw("x" * WIDTH)
    assert "x" * WIDTH in svg
