"""An attacker who owns the installation acts at every step of a run that may be root's.

At each announced change to the file system, something in the installation or in our state folder
is swapped for a link, a hard link or a pipe. Whatever becomes of the run, nothing outside of the
installation changes, and the run ends with an error of ours or well.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from other_users import let_in

from fault_injection import killed_at, points_of, stepping
from safety_table import Tried
from small_installation import LINKED, PATHS, PLAIN, apply, make_installation, revert
from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.errors import PatchError
from vllm_eagle3_patch.ground.filesystem import Moment
from vllm_eagle3_patch.ground.folder import Attributes, Folder
from vllm_eagle3_patch.transaction.recovery import recover

STATE, LOCK = ".vllm-eagle3-patch", ".vllm-eagle3-patch.lock"
GROUP = "Hostile or bad input"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to be led astray with")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an attacker does is not about what a disk holds after a power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


Outside = dict[str, tuple[object, ...]]
Swap = Callable[[Path, Path], None]


def outside_of(folder: Path) -> Path:
    """Make what must not change: a folder with files named as those that a run writes."""
    outside = folder / "outside"
    for name in (*PATHS, "1/" + PLAIN, "info/exclude", "HEAD", "config/linked.py", "plain.py"):
        file = outside / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"outside " + name.encode())
        file.chmod(0o604)
        os.utime(file, ns=(10**18, 10**18))
    return outside


def look_at(outside: Path) -> Outside:
    """Everything about the files outside, their change time left out: a hard link moves it."""
    found: Outside = {}
    for path in sorted([outside, *outside.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        owner = (status.st_uid, status.st_gid)
        times = status.st_mtime_ns
        found[str(path)] = (status.st_mode, owner, status.st_ino, times, content)
    return found


def out_of_the_way(path: Path) -> None:
    """Make room at a path, as someone may who owns its folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for number in count():
            aside = path.parent / f"aside-{number}"
            if not os.path.lexists(aside):
                path.rename(aside)
                return


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "plain.py")


def hard_link(path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "plain.py")


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


SWAPS = (link_to_folder, link_to_file, hard_link, pipe)
PLACES = {
    "the package folder": "vllm",
    "a folder in it": "vllm/config",
    "a target": PLAIN,
    "the state folder": STATE,
    "the originals": f"{STATE}/originals",
    "a shelf of one run": f"{STATE}/copies/1",
    "the manifest": f"{STATE}/manifest.json",
    "the lock": LOCK,
    ".git": ".git",
    ".git/info": ".git/info",
    ".git/info/exclude": ".git/info/exclude",
}


class Attacker:
    """Swaps one place, once, at one of the points."""

    def __init__(self, number: int, place: Path | None, swap: Swap, outside: Path) -> None:
        self.number = number
        self.place = place
        self.swap = swap
        self.outside = outside
        self.passed = count()
        self.acted = False

    def __call__(self, moment: Moment, operation: str, path: Path) -> None:
        if next(self.passed) != self.number:
            return
        place = path if self.place is None else self.place
        with suppress(FileNotFoundError, NotADirectoryError, FileExistsError):
            out_of_the_way(place)
            self.swap(place, self.outside)
            self.acted = True


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Fail instead of waiting for a pipe for ever."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError(f"it hangs: more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def interrupted(root: Path) -> None:
    """An apply that died when every file was swapped, but not concluded."""
    points = points_of_apply(root)
    last = max(n for n, (_, operation, path) in enumerate(points) if path.name == "plain.py")
    assert killed_at(last, partial(apply, root))


def points_of_apply(root: Path) -> list[tuple[Moment, str, Path]]:
    other = root.parent / "counted"
    shutil.copytree(root, other, symlinks=True)
    points = points_of(lambda: apply(other))
    shutil.rmtree(other)
    return points


RUNS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "apply": (lambda root: None, apply),
    "revert": (apply, revert),
    "recovery": (interrupted, recover),
}


def prepared(folder: Path, run: str) -> Path:
    root = make_installation(folder)
    (root / ".git/info").mkdir(parents=True)
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git/info/exclude").write_text("# ours\n")
    RUNS[run][0](root)
    return root


@pytest.mark.parametrize("run", RUNS)
def test_an_attacker_who_swaps_anything_at_any_step_gets_nothing_changed_elsewhere(
    tmp_path: Path, run: str, tried: Tried
) -> None:
    pristine = prepared(tmp_path / "pristine", run)
    outside = outside_of(tmp_path)
    before = look_at(outside)
    work = tmp_path / "work"
    shutil.copytree(pristine.parent, work, symlinks=True)
    number_of_points = len(points_of(lambda: RUNS[run][1](work / "site-packages")))
    tried_here = 0
    places = [*PLACES.values(), None]
    for number in range(number_of_points):
        # Every place at every sixth point, what the call itself names at each.
        for index, place in enumerate(places):
            if place is not None and (number + index) % 6:
                continue
            swap = SWAPS[(number + index) // 6 % len(SWAPS)]
            for chosen in (swap, SWAPS[number % 4]) if place is None else (swap,):
                shutil.rmtree(work)
                shutil.copytree(pristine.parent, work, symlinks=True)
                root = work / "site-packages"
                attacker = Attacker(number, root / place if place else None, chosen, outside)
                with stepping(attacker), no_longer_than(20), suppress(PatchError):
                    RUNS[run][1](root)
                assert look_at(outside) == before, (run, number, place, chosen.__name__)
                tried_here += attacker.acted
    assert tried_here > number_of_points
    tried(
        GROUP,
        f"the owner of the installation swaps things during {run}",
        how="a folder, a target, the state, the lock or git's files for a symbolic link, "
        "a hard link or a pipe, before and after each change",
        count=tried_here,
        result="nothing outside changed; no traceback, no wait",
    )


class TestCallsThatTookAName:
    """What changed the mode, owner or times of a name, and not of what had been opened."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Folder]:
        (tmp_path / "inside").mkdir()
        with Folder.at(tmp_path / "inside") as folder:
            yield folder

    def test_a_folder_swapped_when_it_was_made_gives_nobody_its_mode(
        self, tmp_path: Path, folder: Folder, tried: Tried
    ) -> None:
        secret = tmp_path / "secret"
        secret.mkdir(mode=0o700)

        def swap(moment: Moment, operation: str, path: Path) -> None:
            if (moment, operation) == ("after", "mkdir"):
                path.rmdir()
                path.symlink_to(secret)

        for umask in (0o022, 0o077):
            before = os.umask(umask)
            try:
                with stepping(swap):
                    filesystem.make_directory(folder, "new", 0o755)
            finally:
                os.umask(before)
            assert stat.S_IMODE(secret.stat().st_mode) == 0o700
            (folder.path / "new").unlink()
        tried(
            GROUP,
            "a folder that was just made is swapped for a link",
            how="to a private folder outside",
            count=2,
            result="the private folder keeps its mode",
        )

    @as_root
    @pytest.mark.parametrize("operation", ["symlink", "fchown", "utimensat"])
    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_a_link_swapped_when_it_was_copied_gives_nobody_a_file(
        self, tmp_path: Path, folder: Folder, tried: Tried, operation: str, kind: str
    ) -> None:
        secret = tmp_path / "secret"
        secret.symlink_to("/none") if kind == "link" else secret.touch(mode=0o600)
        before = secret.lstat()
        (folder.path / "old").symlink_to("/nowhere")
        os.chown(folder.path / "old", 12345, 12345, follow_symlinks=False)
        swapped = []

        def swap(moment: Moment, name: str, path: Path) -> None:
            if name == operation and moment == ("after" if name == "symlink" else "before"):
                path.unlink()
                os.link(secret, path, follow_symlinks=False)
                swapped.append(path)

        with stepping(swap), suppress(OSError):
            filesystem.copy_symlink(folder, "old", folder, "new")
        after = secret.lstat()
        assert swapped
        assert (after.st_uid, after.st_mtime_ns) == (before.st_uid, before.st_mtime_ns)
        tried(
            GROUP,
            "a link that root copies is swapped for a hard link",
            how="to a private file or link outside, before its owner and its times are set",
            result="it keeps its owner and times",
        )

    @as_root
    def test_a_copied_link_has_the_owner_and_the_times_of_the_first(self, folder: Folder) -> None:
        (folder.path / "old").symlink_to("/nowhere")
        os.chown(folder.path / "old", 12345, 12346, follow_symlinks=False)
        os.utime(folder.path / "old", ns=(10**18, 10**18), follow_symlinks=False)
        filesystem.copy_symlink(folder, "old", folder, "new")
        made = (folder.path / "new").lstat()
        assert (made.st_uid, made.st_gid, made.st_mtime_ns) == (12345, 12346, 10**18)

    @as_root
    def test_no_file_gets_capabilities(self, folder: Folder, tried: Tried) -> None:
        capable = folder.path / "capable"
        capable.touch()
        every_one = bytes.fromhex("0100000200200000000000000000000000000000")
        try:
            os.setxattr(capable, "security.capability", every_one)
        except OSError as error:
            assert error.errno in {errno.ENOTSUP, errno.EPERM}
            pytest.skip("this system gives files no capabilities")
        attributes = folder.snapshot("capable").attributes
        filesystem.write_new_file(folder, "new", b"", attributes)
        given = Attributes(0o755, extended={"user.a": b"1"})
        filesystem.write_new_file(folder, "other", b"", given)
        assert "security.capability" not in os.listxattr(folder.path / "new")
        tried(
            GROUP,
            "a kept file with capabilities",
            how="restored by root from its copy",
            result="the file that root writes has none",
        )


@as_root
def test_root_and_a_real_other_user_race_for_names(tmp_path: Path, tried: Tried) -> None:
    """Another user swaps things as fast as he can, while root applies and reverts."""
    rounds = 6
    let_in(tmp_path)
    outside = outside_of(tmp_path)
    outside.chmod(0o700)
    before = look_at(outside)
    said, swaps = os.pipe(), list[int]()
    for number in range(rounds):
        root = make_installation(tmp_path / str(number))
        for path in [root, *root.rglob("*")]:
            os.chown(path, 12345, 12345, follow_symlinks=False)
        stop, end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(end)
                os.close(said[0])
                os.setgroups([])
                os.setgid(12345)
                os.setuid(12345)
                os.set_blocking(stop, False)
                os.write(said[1], swap_until(stop, root, outside).to_bytes(8, "big"))
            finally:
                os._exit(0)
        os.close(stop)
        try:
            with no_longer_than(30):
                for command in (apply, recover, revert, apply, recover, revert) * 3:
                    with suppress(PatchError):
                        command(root)
        finally:
            os.close(end)
            os.waitpid(child, 0)
        swaps.append(int.from_bytes(os.read(said[0], 8), "big"))
        assert look_at(outside) == before
        for path in root.rglob("*"):
            assert not path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID) or path.is_dir()
    for descriptor in said:
        os.close(descriptor)
    assert sum(swaps) > rounds, "the attacker hardly got anything swapped"
    tried(
        GROUP,
        "root acts in the installation of another user, who races it",
        how="a real process of that user swaps folders, targets and our own files for links to a "
        "private folder, as fast as it can; apply, recovery and revert",
        count=rounds * 18,
        result="nothing outside changed its owner, mode or content; nothing got set-user-id",
    )


def swap_until(stop: int, root: Path, outside: Path) -> int:
    """Swap one place after another for a link and back, until the pipe is closed.

    Returns:
        How often it did.
    """
    places = [root / LINKED, root / "vllm/config", root / STATE, root / STATE / "originals"]
    swaps = 0
    for number in count():
        with suppress(BlockingIOError):
            if os.read(stop, 1) == b"":
                break
        place = places[number % len(places)]
        aside = place.with_name(f"{place.name}.aside")
        with suppress(OSError):
            place.rename(aside)
            place.symlink_to(outside)
            swaps += 1
        with suppress(OSError):
            place.unlink()
        with suppress(OSError):
            aside.rename(place)
    return swaps
