"""Nothing changes an installation but the one module whose every change is announced.

Told in two ways: by the kernel, through strace, and by Python's audit hooks.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from safety_table import Tried

TESTS = Path(__file__).parents[1]
GROUP = "Nothing bypasses the one module"

ANNOUNCING = """
import os, sys
from pathlib import Path
from vllm_eagle3_patch.cli import program
from vllm_eagle3_patch.ground import filesystem

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND)

def step(moment, operation, path):
    if moment == "before":
        os.write(log, f"{operation} {path}\\n".encode())

filesystem.step = step
BYPASS
program.main()
"""
BYPASSES = {
    "a new file": "Path(sys.argv[-1], 'vllm/bypass.py').write_bytes(b'')",
    "an existing file opened for writing": "open(Path(sys.argv[-1], 'vllm/__init__.py'), 'r+')",
    "a mode": "Path(sys.argv[-1], 'vllm/__init__.py').chmod(0o600)",
    "a rename": "Path(sys.argv[-1], 'vllm/_version.py').rename(Path(sys.argv[-1], 'vllm/x.py'))",
    "a folder": "Path(sys.argv[-1], 'vllm/bypass').mkdir()",
    "a time": "os.utime(Path(sys.argv[-1], 'vllm/__init__.py'))",
}

_CALLS = {
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "chmod": "fchmod",
    "fchmod": "fchmod",
    "fchmodat": "fchmod",
    "fchmodat2": "fchmod",
    "chown": "fchown",
    "lchown": "fchown",
    "fchown": "fchown",
    "fchownat": "fchown",
    "write": "write",
    "pwrite64": "write",
    "writev": "write",
    "pwritev": "write",
    "utimensat": "utimensat",
    "utime": "utimensat",
    "utimes": "utimensat",
    "futimesat": "utimensat",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "link": "link",
    "linkat": "link",
    "symlink": "symlink",
    "symlinkat": "symlink",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "unlink": "unlink",
    "rmdir": "rmdir",
    "setxattr": "setxattr",
    "fsetxattr": "setxattr",
    "lsetxattr": "setxattr",
    "removexattr": "removexattr",
    "fremovexattr": "removexattr",
    "lremovexattr": "removexattr",
    "truncate": "truncate",
    "ftruncate": "truncate",
    "fallocate": "fallocate",
    "mknod": "mknod",
    "mknodat": "mknod",
    "copy_file_range": "copy",
    "sendfile": "copy",
}
_LINE = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
_DATA = re.compile(r'(?<=>), "(?:[^"\\]|\\.)*"(\.\.\.)?, \d+$')
_PLACE = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>(?:\(deleted\))?(?:, "([^"]*)")?)|"([^"]*)"')
_WRITING = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)")


def calls_below(root: Path, trace: str) -> list[str]:
    """The changes that the kernel made below a folder, named as the module announces them."""
    found = []
    for line in trace.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        call, arguments, result = match.groups()
        name = _CALLS.get(call)
        if call == "unlinkat":
            name = "rmdir" if "AT_REMOVEDIR" in arguments else "unlink"
        elif call in {"open", "openat", "openat2", "creat"} and _WRITING.search(arguments):
            name = "create" if "O_CREAT" in arguments else "open for writing"
        if name is None or int(result) < 0:
            continue
        if name == "write":
            arguments = _DATA.sub("", arguments)
        places = [_place(match) for match in _PLACE.finditer(arguments)]
        # Of two names the new one counts.
        place = places[-1] if name in {"rename", "link", "symlink"} else places[0]
        if place == str(root) or place.startswith(f"{root}/"):
            found.append(f"{name} {place}")
    return found


def _place(match: re.Match[str]) -> str:
    folder, name, path = match.groups()
    if folder is None or (name or "").startswith("/"):
        return path or name
    return f"{folder}/{name}" if name else folder


@pytest.fixture(scope="module")
def strace() -> str:
    """The program, where it may be used."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    allowed = subprocess.run([program, "-o", os.devnull, "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("strace may not be used here")
    return program


def traced(strace: str, root: Path, command: str, bypass: str = "") -> tuple[list[str], list[str]]:
    """Run a command under strace; returns what it announced and what the kernel did."""
    log, trace = root.parent / "announced", root.parent / "trace"
    log.write_bytes(b"")
    calls = [*_CALLS, "open", "openat", "creat", "openat2", "unlinkat"]
    asked = "trace=" + ",".join(f"?{call}" for call in calls)
    tracing = [strace, "-f", "-y", "-s", "256", "-e", "signal=none", "-e", asked, "-o", str(trace)]
    program = ANNOUNCING.replace("BYPASS", bypass)
    subprocess.run(
        [*tracing, sys.executable, "-c", program, str(log), command, "--site-packages", str(root)],
        check=True,
        capture_output=True,
        cwd=TESTS.parent,
    )
    return log.read_text().splitlines(), calls_below(root, trace.read_text())


def test_strace_sees_what_is_announced_and_nothing_else(
    strace: str, site_packages: Path, tried: Tried
) -> None:
    count = 0
    for command in ("apply", "revert"):
        announced, done = traced(strace, site_packages, command)
        assert len(done) > 100
        assert done == announced
        count += len(done)
    tried(
        GROUP,
        "apply and revert of vLLM 0.17.1 in their own process",
        how="strace: every call that opens for writing, writes, renames, links, removes or syncs",
        count=count,
        result="each is one that the module announced, in the same order",
    )


def test_strace_sees_a_bypass(strace: str, site_packages: Path, tried: Tried) -> None:
    """Otherwise the test above would say nothing."""
    bypass = "\n".join(BYPASSES.values())
    announced, done = traced(strace, site_packages, "revert", bypass)
    assert announced == []
    assert len(done) == len(BYPASSES)
    tried(
        GROUP,
        "a change made past the module, on purpose",
        how="strace, each kind of change",
        count=len(done),
        result="noticed",
    )


AUDITING = """
import os, sys
from pathlib import Path
from vllm_eagle3_patch.cli import program
from vllm_eagle3_patch.ground import filesystem

root = sys.argv[-1]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.mkfifo", "os.mknod", "os.remove",
    "os.removexattr", "os.rename", "os.rmdir", "os.setxattr", "os.symlink", "os.truncate",
    "os.unlink", "os.utime", "shutil.copyfile", "shutil.move", "shutil.rmtree", "os.chflags",
}
seen = {"inside": 0, "outside": 0}

def hook(event, arguments):
    if not (event in CHANGES or (event == "open" and arguments[2] & WRITING)):
        return
    frame, files = sys._getframe(1), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    if filesystem.__file__ == files[0]:
        seen["inside"] += 1
    elif arguments[0] not in ("/dev/null", os.devnull):
        seen["outside"] += 1
        print("outside", event, arguments, files[:2], file=sys.stderr)

sys.dont_write_bytecode = True
sys.addaudithook(hook)
BYPASS
try:
    program.main()
except SystemExit as end:
    assert end.code in (0, 1), end.code
print(seen["inside"], seen["outside"], file=sys.stderr)
"""


def audited(root: Path, command: str, bypass: str = "") -> Sequence[int]:
    """Run a command; returns how many changes Python saw the module make, and others."""
    program = AUDITING.replace("BYPASS", bypass)
    ended = subprocess.run(
        [sys.executable, "-c", program, command, "--site-packages", str(root)],
        check=True,
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    return [int(number) for number in ended.stderr.splitlines()[-1].split()]


def test_python_sees_no_change_outside_the_module(site_packages: Path, tried: Tried) -> None:
    count = 0
    for command in ("check", "apply", "check", "revert"):
        inside, outside = audited(site_packages, command)
        assert outside == 0
        assert (inside > 50) == (command != "check")
        count += inside
    tried(
        GROUP,
        "check, apply and revert of vLLM 0.17.1, wherever they write",
        how="Python's audit hooks: every event that opens for writing or changes names",
        count=count,
        result="each comes from that module; check has none",
    )


@pytest.mark.parametrize("what", BYPASSES)
def test_python_sees_a_bypass(site_packages: Path, what: str, tried: Tried) -> None:
    _, outside = audited(site_packages, "revert", BYPASSES[what])
    assert outside == 1
    tried(
        GROUP,
        "a change made past the module, on purpose",
        how="audit hooks, each kind of change",
        result="noticed",
    )
