"""Many runs at once in one installation, on one host and on several.

The stand-in for a network file system that does not share kernel locks is a local folder with
``flock`` refused, and processes that call themselves by other hosts' names and boots. Where the
system allows it, processes in PID and host name namespaces of their own stand for hosts too.
"""

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from command_line import run
from conftest import small_copy
from fault_injection import BEFORE, in_memory, killed_at, points_of
from safety_table import Tried
from small_installation import NEW, OLD, apply, contents, make_installation, revert
from vllm_eagle3_patch.assess.assessment import Assessment
from vllm_eagle3_patch.assess.classify import classify
from vllm_eagle3_patch.ground.errors import BusyError, ModifiedFileError
from vllm_eagle3_patch.installation.find import Installation
from vllm_eagle3_patch.transaction.state import lock, lock_holder
from vllm_eagle3_patch.transaction.state.journal import unfinished
from vllm_eagle3_patch.transaction.state.lock import held_by
from vllm_eagle3_patch.transaction.state.lock_holder import LONGEST_RUN_NS

__all__ = ["in_memory"]  # a fixture

TESTS = Path(__file__).parents[1]
GROUP = "Two at once"
STATE = ".vllm-eagle3-patch"
HOSTS = "processes that call themselves other hosts, kernel locks (flock) refused"


def refuse_kernel_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def be_host(number: int) -> None:
    """Have this process be on a host of its own that shares no kernel locks."""
    real = lock_holder.this_process

    def another() -> lock_holder.Holder:
        return replace(real(), host=f"host{number}", boot=f"boot{number}")

    lock.this_process = lock_holder.this_process = another
    fcntl.flock = refuse_kernel_locks


def child_process(action: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = action()
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "several hosts"])
def test_many_commands_at_once(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, hosts: bool, tried: Tried
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    root = small_copy("0.17.1", in_memory / "site-packages")
    sources = [path for path in (root / "vllm").rglob("*.py") if path.is_file()]
    old = {path: path.read_bytes() for path in sources}
    assert run("apply", "--site-packages", root).exit_code == 0
    new = {path: path.read_bytes() for path in sources}
    codes = in_memory / "codes"

    def work(number: int) -> int:
        if hosts:
            be_host(number)
        chance = random.Random(number)
        for _ in range(12):
            command = chance.choice(["apply", "revert"])
            code = run(command, "--site-packages", root).exit_code
            with codes.open("a") as file:
                file.write(f"{code}\n")
            if code == 7:
                time.sleep(chance.random() / 50)
        return 0

    children = {child_process(partial(work, number)) for number in range(4)}
    looks = 0
    while children:
        for path in sources:
            assert path.read_bytes() in (old[path], new[path])
        looks += 1
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            children.discard(child)
            assert status == 0
    ended = codes.read_text().split()
    assert set(ended) == {"0", "7"}
    found = {path: path.read_bytes() for path in sources}
    assert found in (old, new)
    assert unfinished(root) is None
    assert run("revert", "--site-packages", root).exit_code == 0
    assert {path: path.read_bytes() for path in sources} == old
    assert not list(root.glob(STATE + "*"))
    tried(
        GROUP,
        "apply and revert by four processes at once",
        how=HOSTS if hosts else "processes of one host, on the files of vLLM 0.17.1",
        count=len(ended),
        result="each ends with exit code 0 or 7; no file is torn, none is mixed at the end",
    )


def work_on_small(folder: str, host: str, kernel_locks: str) -> None:
    """Run by a process in namespaces of its own: what it did, a letter each."""
    if host:
        Path("/proc/sys/kernel/hostname").write_text(host)
        assert os.getpid() == 1
    if not kernel_locks:
        fcntl.flock = refuse_kernel_locks
    root = Path(folder)
    said = ""
    for number in range(20):
        try:
            if number % 2:
                revert(root)
            else:
                apply(root)
            said += "0"
        except BusyError:
            said += "7"
            time.sleep(0.01)
        except ModifiedFileError:
            said += "5"
    print(said)


@pytest.mark.parametrize("kernel_locks", ["yes", ""], ids=["flock", "no flock"])
def test_containers_at_once(tmp_path: Path, kernel_locks: str, tried: Tried) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    alone = [unshare, "--pid", "--uts", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces of one's own are not allowed here")
    root = make_installation(tmp_path)
    program = "import sys, test_two_at_once as t; t.work_on_small(*sys.argv[1:])"
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent, Path(__file__).parent)))
    running = [
        subprocess.Popen(
            [*alone, sys.executable, "-c", program, str(root), f"host{number}", kernel_locks],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for number in range(3)
    ]
    said = "".join(process.communicate()[0].strip() for process in running)
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(said) == 60
    assert "0" in said
    assert contents(root) in (OLD, NEW)
    assert unfinished(root) is None
    revert(root)
    assert contents(root) == OLD
    tried(
        GROUP,
        "apply and revert by three containers at once",
        how="PID and host name namespaces of their own, kernel locks " + (kernel_locks or "no"),
        count=len(said),
        result="each ends as if alone or is told that another run is busy; nothing is mixed",
    )


def reverted_elsewhere(root: Path) -> int:
    be_host(2)
    try:
        revert(root)
    except BusyError:
        return 7
    return 0


@pytest.mark.parametrize("seconds", [3500, 3700])
def test_a_killed_holder_on_another_host(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, tried: Tried
) -> None:
    """Kept out for an hour by the file system's own clock, then not any more."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    points = len(points_of(partial(apply, make_installation(in_memory / "tried")))) // 2

    def on_host(number: int, action: Callable[[], object]) -> object:
        be_host(number)
        return action()

    ended = 0
    for number in range(4, points, 7):
        root = make_installation(in_memory / str(number))
        assert killed_at(number, partial(on_host, 1, partial(apply, root)), BEFORE)
        records = list(root.glob(f"{lock.FOLDER}/*"))
        for record in records:
            before = record.stat().st_mtime_ns - seconds * 10**9
            os.utime(record, ns=(before, before))

        if not (records and (root / STATE).exists()):
            continue  # killed before it had the lock, or after
        _, status = os.waitpid(child_process(partial(reverted_elsewhere, root)), 0)
        dead = seconds * 10**9 > LONGEST_RUN_NS
        assert os.waitstatus_to_exitcode(status) == (0 if dead else 7)
        assert all(data in (OLD[path], NEW[path]) for path, data in contents(root).items())
        if dead:
            assert contents(root) == OLD
        ended += 1
    assert ended > 5
    tried(
        GROUP,
        f"a run on another host is killed, and its lock is {seconds} s old",
        how="SIGKILL at a spread of changes; " + HOSTS,
        count=ended,
        result="the next run gets there" if seconds > 3600 else "the next run is told to wait",
    )


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_what_half_of_another_run_showed_is_looked_at_again_under_the_lock(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    assert run("apply", "--site-packages", site_packages).exit_code == 0
    if command == "apply":
        assert run("revert", "--site-packages", site_packages).exit_code == 0
    held = []

    def classify_half(installation: Installation) -> Assessment:
        """Without the lock, as if each look fell into the middle of another run."""
        assessment = classify(installation)
        held.append(held_by(site_packages) is not None)
        if held[-1]:
            return assessment
        edited = tuple(status._replace(state="modified") for status in assessment.files)
        return assessment._replace(manifest=None, files=edited)

    monkeypatch.setattr(f"vllm_eagle3_patch.commands.{command}.classify", classify_half)
    assert run(command, "--site-packages", site_packages).exit_code == 0
    assert any(held)
