"""Write ``docs/terminal.svg``: a real run on a real vLLM 0.17.1, as a terminal shows it.

The commands are typed into a shell in a pseudo terminal; what it shows is drawn by rich. Only
paths are changed: the sandbox is called ``/opt/venv`` and its Python 3.12 on every machine.
"""

from __future__ import annotations

import fcntl
import html
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import venv
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tools.fetch_release import IndexUnreachableError, copy_site_packages

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "terminal.svg"
RELEASE = "0.17.1"
WIDTH = 132
COMMANDS = (
    "vllm-eagle3-patch check --model kimi_k25",
    "vllm-eagle3-patch apply | tail -n 15",
    "vllm-eagle3-patch check --model kimi_k25 | tail -n 1",
    "vllm-eagle3-patch revert | tail -n 1",
)

# Dark as most terminals are, with every colour legible on it.
THEME = TerminalTheme(
    (22, 27, 34),
    (214, 220, 228),
    [
        (72, 79, 88),
        (255, 123, 114),
        (126, 211, 133),
        (227, 179, 65),
        (121, 192, 255),
        (210, 168, 255),
        (86, 212, 221),
        (214, 220, 228),
    ],
)

# As rich's own, without what it loads from elsewhere and without a window's buttons.
SVG = """\
<svg class="terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>vllm-eagle3-patch: check, apply, check, revert on a real vLLM 0.17.1</title>
<style>
.{unique_id}-matrix {{
    font-family: "DejaVu Sans Mono", Menlo, Consolas, "Liberation Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
    font-variant-east-asian: full-width;
}}
.{unique_id}-title {{
    font-family: Arial, Helvetica, sans-serif;
    font-size: 18px;
    font-weight: bold;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> int:
    """Run the commands and write the picture."""
    with tempfile.TemporaryDirectory(prefix="picture-", dir="/tmp") as folder:
        sandbox = Path(folder) / "venv"
        try:
            make_sandbox(sandbox)
        except IndexUnreachableError as error:
            print(error, file=sys.stderr)
            return 1
        shown = "\n".join(
            f"\x1b[1;34m$\x1b[0m \x1b[1m{command}\x1b[0m\n{run(command, sandbox)}"
            for command in COMMANDS
        )
    PICTURE.write_text(draw(normalised(shown, sandbox)), encoding="utf-8")
    print(PICTURE)
    return 0


def make_sandbox(folder: Path) -> None:
    """A venv that holds the Python files of vLLM and nothing else."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    site_packages.rmdir()
    copy_site_packages(RELEASE, site_packages)


def run(command: str, sandbox: Path) -> str:
    """What a terminal of a certain width shows of a command line, colours included."""
    environment = {
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
        "TERM": "xterm-256color",
        "VIRTUAL_ENV": str(sandbox),
    }
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ):
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""  # How Linux says that the other side is closed.


def normalised(shown: str, sandbox: Path) -> str:
    """The same text for every machine: the sandbox's path and Python's version replaced."""
    shown = shown.replace(str(sandbox), "/opt/venv")
    return re.sub(r"/lib/python3\.\d+/", "/lib/python3.12/", shown)


def draw(shown: str) -> str:
    """The picture of what a terminal shows."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in shown.splitlines():
        console.print(Text.from_ansi(line), overflow="ignore", no_wrap=True, crop=True)
    svg = console.export_svg(
        title="vllm-eagle3-patch on vLLM 0.17.1", theme=THEME, code_format=SVG, unique_id="run"
    )
    # The three buttons of a window that is none.
    svg = re.sub(r"<g transform=\"translate\(26,22\)\">.*?</g>", "", svg, flags=re.DOTALL)
    svg = _TEXT.sub(_columns, svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


_TEXT = re.compile(
    r'<text class="(run-r\d+)" x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+" clip-path="([^"]+)">'
    r"([^<]*)</text>"
)
_CHARACTER = 12.2  # A character's width in rich's pictures.


def _columns(text: re.Match[str]) -> str:
    """Each column of a line at its own place, as viewers differ in how wide they draw blanks."""
    style, left, top, clip, escaped = text.groups()
    shown = html.unescape(escaped)
    parts = []
    for column in re.finditer(r"[^\xa0]+(?:\xa0[^\xa0]+)*", shown):
        x = float(left) + column.start() * _CHARACTER
        length = len(column[0]) * _CHARACTER
        content = html.escape(column[0])
        parts.append(
            f'<text class="{style}" x="{x:g}" y="{top}" textLength="{length:g}" '
            f'clip-path="{clip}">{content}</text>'
        )
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main())
