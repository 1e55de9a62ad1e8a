"""What the system refuses, and a kill, through the command line and on vLLM's own files."""

import errno
import os
import pwd
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from other_users import let_in

from command_line import Ended, run, snapshot
from conftest import small_copy
from fault_injection import BEFORE, failing_at, in_memory, killed_at, points_of
from safety_table import Tried
from small_installation import contents
from test_interrupted_runs import (
    ERRORS,
    PLAIN_RUNS,
    RUN,
    SAID,
    Action,
    Case,
    Contents,
    leftovers_of_a_run,
    succeeds,
)
from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.filesystem import Moment, Step
from vllm_eagle3_patch.transaction.recovery import recover
from vllm_eagle3_patch.transaction.state.journal import unfinished

__all__ = ["in_memory"]  # a fixture

TESTS = Path(__file__).parents[1]
FAILING = "A change that fails"

Tree = dict[str, bytes]


@pytest.fixture
def not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote, synced or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def files(root: Path) -> Tree:
    """The bytes of every file of vLLM, staged ones left out."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in (root / "vllm").rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def command(name: str, root: Path) -> Ended:
    return run(name, "--json", "--site-packages", root)


def done(name: str, root: Path) -> None:
    assert command(name, root).exit_code == 0


@pytest.mark.parametrize(("name", "stride"), [("apply", 16), ("revert", 12)])
def test_a_killed_command(
    in_memory: Path, not_synced: None, name: str, stride: int, tried: Tried
) -> None:
    kept = small_copy("0.17.1", in_memory / "kept" / "site-packages")
    original = files(kept)
    if name == "revert":
        done("apply", kept)
    before = files(kept)
    root = in_memory / "site-packages"
    shutil.copytree(kept, root, symlinks=True)
    points = len(points_of(partial(done, name, root))) // 2
    after = files(root)
    assert before != after
    codes = set()
    for number in range(0, points, stride):
        shutil.rmtree(root)
        shutil.copytree(kept, root, symlinks=True)
        assert killed_at(number, partial(done, name, root), BEFORE)
        found = files(root)
        assert all(data in (before[path], after[path]) for path, data in found.items())
        code = command("check", root).exit_code
        codes.add(code)
        assert code == 8 or (code, found) in (
            (0 if name == "revert" else 1, before),
            (1 if name == "revert" else 0, after),
        )
        done(name, root)
        assert files(root) == after
        done("revert", root)
        assert files(root) == original
        assert not list(root.glob(".vllm-eagle3-patch*"))
    assert 8 in codes
    tried(
        "Killed",
        f"the command {name} is killed on the files of vLLM 0.17.1",
        how=f"SIGKILL before every {stride}th change; check, then the same command, then revert",
        count=len(range(0, points, stride)),
        result="check exits 8, or as before or after; the next command gets there; no file is torn",
    )


@pytest.mark.parametrize("number_of_error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(RUN, PLAIN_RUNS)
def test_each_error_at_each_change(
    in_memory: Path,
    not_synced: None,
    prepare: Action,
    run: Action,
    before: Contents,
    after: Contents,
    number_of_error: int,
    tried: Tried,
) -> None:
    case = Case(in_memory, prepare)
    error = OSError(number_of_error, os.strerror(number_of_error))
    root = case.fresh()
    for number in count():
        if contents(root) != before:
            root = case.fresh()
        with failing_at(number, error, BEFORE) as failed:
            ended = succeeds(partial(run, root))
        if not failed:
            break
        assert contents(root) == (after if ended else before)
        assert unfinished(root) is None
        recover(root)
        assert not leftovers_of_a_run(root)
    assert number > 60
    tried(
        FAILING,
        f"{SAID[run]}: one call fails with ENOSPC, EIO, EACCES, EROFS, EMFILE or EDQUOT",
        how="each error at each change",
        count=number,
        result="all files as before, or all done where only tidying up failed; nothing is left",
    )


def refused(ended: Ended, code: str, *words: str) -> None:
    """It ended with exit code 7 and told what is wrong and what to do, a line each."""
    assert ended.exit_code == 7, ended
    wrong, what_to_do = ended.stderr.splitlines()
    assert wrong.startswith("error: ")
    (problem,) = ended.document["problems"]
    assert problem["code"] == code
    for word in words:
        assert word in wrong + what_to_do


def in_a_child(action: Callable[[], None]) -> None:
    """Do this in a child process, which it may spoil as it likes."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_a_user_who_may_not_write(in_memory: Path, name: str, tried: Tried) -> None:
    root = small_copy("0.17.1", in_memory / "site-packages")
    in_memory.chmod(0o755)
    if name == "revert":
        done("apply", root)
    run("apply", "--dry-run", "--site-packages", root)
    before = snapshot(root)

    def as_nobody() -> None:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        refused(command(name, root), "permission", "belongs to root and you are nobody")

    in_a_child(as_nobody)
    assert snapshot(root) == before
    done(name, root)
    tried(
        FAILING,
        f"{name} by a user who may not write there",
        how="a process of the user nobody, in a folder of root",
        result="exit code 7, says who owns it and what to do; nothing is written",
    )


@pytest.mark.parametrize("name", ["apply", "revert"])
def test_no_more_open_files(in_memory: Path, name: str, tried: Tried) -> None:
    kept = small_copy("0.17.1", in_memory / "kept" / "site-packages")
    if name == "revert":
        done("apply", kept)
    root = in_memory / "site-packages"
    shutil.copytree(kept, root, symlinks=True)
    done(name, root)  # what it imports is loaded then
    shutil.rmtree(root)
    shutil.copytree(kept, root, symlinks=True)
    before = snapshot(root)
    said = in_memory / "said"

    def with_few(spare: int) -> None:
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        limit = lowest + spare
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        ended = command(name, root)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        said.write_text(str(ended.exit_code))
        if ended.exit_code != 0:
            refused(ended, "open-files", "raise the limit of open files")

    for spare in count(2):
        in_a_child(partial(with_few, spare))
        if said.read_text() == "0":
            break
        assert snapshot(root) == before
    assert spare > 4
    tried(
        FAILING,
        f"{name} with too few open files allowed",
        how="a real limit (RLIMIT_NOFILE), one more file each time until it suffices",
        count=spare - 2,
        result="exit code 7, says what to raise; nothing is left changed",
    )


def unshared(*arguments: str) -> None:
    """Skip where a process may not have mounts of its own."""
    program = shutil.which("unshare")
    if program is None:
        pytest.skip("unshare is not installed")
    test = ["--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    if subprocess.run([program, *test], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts of one's own are not allowed here")
    ended = subprocess.run(
        [program, "--mount", sys.executable, "-c", ALONE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}:{Path(__file__).parent}"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


ALONE = "import sys, test_faults; getattr(test_faults, sys.argv[1])(*sys.argv[2:])"


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def read_only_alone(folder: str) -> None:
    """Run by a process with mounts of its own."""
    root = small_copy("0.17.1", Path(folder) / "site-packages")
    for name, prepare in (("apply", "revert"), ("revert", "apply")):
        done(prepare, root)
        before = snapshot(root)
        mount("--bind", str(root), str(root))
        mount("-o", "remount,bind,ro", str(root))
        refused(command(name, root), "read-only", "remount the file system for writing")
        assert snapshot(root) == before
        subprocess.run(["umount", str(root)], check=True)
        done(name, root)


def test_a_read_only_installation(tmp_path: Path, tried: Tried) -> None:
    unshared("read_only_alone", str(tmp_path))
    tried(
        FAILING,
        "apply and revert in a read-only installation",
        how="a read-only mount",
        count=2,
        result="exit code 7, says what to do; nothing is written; done once it is writable",
    )


def filling(filler: Path, operation: str, part: str) -> Step:
    """Fill the disk up before the third such operation."""
    passed = count(1)

    def step(moment: Moment, what: str, path: Path) -> None:
        if (moment, what) != ("before", operation) or part not in str(path) or next(passed) != 3:
            return
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(filler).f_bavail == 0

    return step


def full_alone(folder: str) -> None:
    """Run by a process with mounts of its own."""
    mount("-t", "tmpfs", "-o", "size=16m", "none", folder)
    root = small_copy("0.17.1", Path(folder) / "site-packages")
    filler = Path(folder) / "filler"
    for name, operation, part in (
        ("apply", "create", ".vllm-eagle3-patch-"),
        ("apply", "link", "originals/"),
        ("revert", "link", "previous/"),
    ):
        if name == "revert":
            done("apply", root)
        before = snapshot(root)
        filesystem.step = filling(filler, operation, part)
        ended = command(name, root)
        filesystem.step = filesystem.go_on
        assert filler.exists()
        if ended.exit_code != 0:
            refused(ended, "disk-full", "free some space")
            assert snapshot(root) == before
        filler.unlink()
        done(name, root)
        done("revert", root)
        assert name == "revert" or ended.exit_code == 7


def test_a_disk_that_is_full_at_the_third_file(tmp_path: Path, tried: Tried) -> None:
    unshared("full_alone", str(tmp_path))
    tried(
        FAILING,
        "the disk is full at the third file, when it is staged or kept",
        how="a small file system in memory that is filled up at that moment",
        count=3,
        result="exit code 7 and nothing is left changed, or done; done once there is space",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_who_may_not_give_files_back(in_memory: Path, tried: Tried) -> None:
    root = small_copy("0.17.1", in_memory / "site-packages")
    let_in(root)
    nobody = pwd.getpwnam("nobody")
    done("apply", root)  # What the commands load is loaded before the user changes.
    done("revert", root)
    # The folders are the user's, the files root's: he may replace them, not give one another name.
    for path in (root, *root.rglob("*")):
        os.chown(path, *((nobody.pw_uid, nobody.pw_gid) if path.is_dir() else (0, 0)))
    before = files(root)

    def as_nobody() -> None:
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        changed = command("apply", root).document["changed"]
        reverted = command("revert", root)
        assert reverted.exit_code == 0
        told = "\n".join(reverted.document["notes"])
        for path in changed:
            is_named = f"but for its owner, whom only root could give it back to: {path}" in told
            assert is_named == ((root / path).stat().st_uid != 0)

    in_a_child(as_nobody)
    assert files(root) == before
    tried(
        FAILING,
        "apply and revert by a user who owns the folders and not the files",
        how="a process of the user nobody, files of root",
        result="the bytes are as before, and revert names each file that has another owner now",
    )
