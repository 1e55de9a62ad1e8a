"""Committing changes, all or none, and getting back."""

import errno
import os
import py_compile
import stat
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_injection import points_of, stepping
from small_installation import (
    LINKED,
    NEW,
    OLD,
    PATHS,
    PLAIN,
    PUBLISHED,
    SYMLINK,
    apply,
    change,
    contents,
    make_installation,
    new,
    newer,
    old,
    revert,
    tree,
)
from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.ground.errors import (
    BusyError,
    ModifiedFileError,
    NotReadableError,
    NotWritableError,
    StateCorruptError,
    UnsupportedError,
    VerificationError,
)
from vllm_eagle3_patch.transaction.change import Change
from vllm_eagle3_patch.transaction.git_exclude import BLOCK
from vllm_eagle3_patch.transaction.recovery import recover
from vllm_eagle3_patch.transaction.revert import Origins
from vllm_eagle3_patch.transaction.state import lock
from vllm_eagle3_patch.transaction.state.journal import unfinished
from vllm_eagle3_patch.transaction.state.manifest import original_bytes, read_manifest

STATE = ".vllm-eagle3-patch"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_installation(tmp_path)


def edit(file: Path, data: bytes = b"edited") -> None:
    """Save a file as editors do: as a new one."""
    file.unlink()
    file.write_bytes(data)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


class LinksRefused:
    """A file system without hard links."""

    def __init__(self, number: int = errno.EPERM) -> None:
        self.number = number

    def __call__(self, moment: str, operation: str, path: Path) -> None:
        if operation == "link":
            raise OSError(self.number, os.strerror(self.number))


def test_apply_changes_every_file_and_says_so(root: Path) -> None:
    assert apply(root) == ()
    assert contents(root) == NEW
    manifest = read_manifest(root)
    assert manifest is not None
    assert (manifest.tool, manifest.vllm, manifest.release) == ("1.0", "0.17.1", "0.17.1")
    for path in PATHS:
        entry = manifest.files[path]
        assert (entry.original, entry.written) == (sha256(old(path)), sha256(new(path)))
        assert entry.patches == ("a-patch",)
        assert (entry.symlink is not None) == (path == SYMLINK)
        assert original_bytes(root, entry) == old(path)


def test_apply_never_touches_what_a_cache_shares(root: Path, tmp_path: Path) -> None:
    cache = tree(tmp_path / "cache")
    apply(root)
    assert tree(tmp_path / "cache") == cache


def test_apply_keeps_modes_and_advances_times(root: Path) -> None:
    before = {path: (root / path).stat() for path in PATHS}
    apply(root)
    for path in PATHS:
        after = (root / path).lstat()
        assert stat.S_ISREG(after.st_mode)
        assert stat.S_IMODE(after.st_mode) == stat.S_IMODE(before[path].st_mode)
        assert (after.st_uid, after.st_gid) == (before[path].st_uid, before[path].st_gid)
        assert after.st_mtime_ns > before[path].st_mtime_ns


def test_revert_leaves_the_tree_exactly_as_before(root: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    apply(root)
    result = revert(root)
    assert tree(tmp_path) == before
    assert result.reverted == PATHS
    assert result.left_alone == result.stale == ()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP])
def test_revert_without_hard_links_brings_back_bytes_and_attributes(
    root: Path, number: int
) -> None:
    before = tree(root)
    with stepping(LinksRefused(number)):
        apply(root)
        revert(root)
    after = tree(root)
    assert after[SYMLINK][0] == before[SYMLINK][0]
    assert after[SYMLINK][2:] == before[SYMLINK][2:]
    for path in (LINKED, PLAIN):
        mode, _, *rest = before[path]
        assert (after[path][0], *after[path][2:]) == (mode, *rest)
    assert after.keys() == before.keys()


def test_roll_back_without_hard_links(root: Path) -> None:
    before = tree(root)
    with stepping(LinksRefused()), pytest.raises(VerificationError):
        apply(root, check=failing)
    assert tree(root).keys() == before.keys()
    assert {path: entry[2:] for path, entry in tree(root).items()} == {
        path: entry[2:] for path, entry in before.items()
    }


def test_apply_again_and_roll_back_without_hard_links(root: Path) -> None:
    with stepping(LinksRefused()):
        apply(root)
        with pytest.raises(VerificationError):
            apply(root, *(change(path, new(path), newer(path)) for path in PATHS), check=failing)
        assert contents(root) == NEW
        revert(root)
    assert contents(root) == OLD


@pytest.fixture
def package_elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package folder is a mount point: nothing is linked or renamed across its border."""

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def checked(*names: str, src_dir_fd: int, dst_dir_fd: int, **options: bool) -> None:
            ends = [Path(f"/proc/self/fd/{fd}").readlink() for fd in (src_dir_fd, dst_dir_fd)]
            if len({end.is_relative_to(root / "vllm") for end in ends}) == 2:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            call(*names, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **options)

        return checked

    monkeypatch.setattr(os, "link", guarded(os.link))
    monkeypatch.setattr(os, "rename", guarded(os.rename))


def test_a_package_that_is_another_file_system(root: Path, package_elsewhere: None) -> None:
    before = {path: (entry[0], *entry[2:]) for path, entry in tree(root).items()}
    with pytest.raises(VerificationError):
        apply(root, check=failing)
    assert {path: (entry[0], *entry[2:]) for path, entry in tree(root).items()} == before
    apply(root)
    with pytest.raises(VerificationError):
        apply(root, *(change(path, new(path), newer(path)) for path in PATHS), check=failing)
    assert contents(root) == NEW
    revert(root)
    assert {path: (entry[0], *entry[2:]) for path, entry in tree(root).items()} == before


def failing() -> None:
    raise ImportError("no module named torch")


def test_a_shared_original_changed_by_others_comes_back_from_its_copy(root: Path) -> None:
    before = tree(root)
    apply(root)
    (root.parent / "cache/linked.py").write_bytes(b"written in place by someone else")
    (root.parent / "cache/symlink.py").unlink()
    revert(root)
    assert contents(root) == OLD
    assert tree(root)[LINKED][2:] == before[LINKED][2:]
    assert tree(root)[LINKED][0] == before[LINKED][0]
    assert not (root / SYMLINK).is_symlink()
    assert (root.parent / "cache/linked.py").read_bytes() == b"written in place by someone else"
    assert STATE not in names(root)


def test_a_relative_symbolic_link_comes_back(root: Path) -> None:
    (root / SYMLINK).unlink()
    (root / SYMLINK).symlink_to("../../../cache/symlink.py")
    before = tree(root)
    apply(root)
    manifest = read_manifest(root)
    assert manifest is not None
    assert original_bytes(root, manifest.files[SYMLINK]) == old(SYMLINK)
    revert(root)
    assert tree(root) == before


def test_a_lost_original_is_an_error_and_nothing_is_written(root: Path) -> None:
    apply(root)
    (root / STATE / "originals/1" / PLAIN).write_bytes(b"damaged")
    (root / STATE / "copies/1" / PLAIN).unlink()
    before = tree(root)
    with pytest.raises(StateCorruptError, match=r"vllm/plain.py: the original .* gone or damaged"):
        revert(root)
    assert tree(root) == before


def test_apply_twice_changes_nothing(root: Path) -> None:
    apply(root)
    before = tree(root)
    apply(root, *(change(path, new(path), new(path)) for path in PATHS))
    assert tree(root) == before


def test_apply_again_keeps_the_first_originals(root: Path) -> None:
    before = tree(root)
    apply(root)
    apply(root, change(PLAIN, new(PLAIN), newer(PLAIN)))
    manifest = read_manifest(root)
    assert manifest is not None
    assert original_bytes(root, manifest.files[PLAIN]) == old(PLAIN)
    assert manifest.files.keys() == set(PATHS)
    assert contents(root) == NEW | {PLAIN: newer(PLAIN)}
    revert(root)
    assert tree(root) == before


def test_a_file_added_later_is_reverted_with_the_others(root: Path) -> None:
    before = tree(root)
    apply(root, change(LINKED))
    apply(root, change(PLAIN))
    revert(root)
    assert tree(root) == before


def test_a_file_changed_back_to_its_original_content_gets_its_inode_back(root: Path) -> None:
    before = tree(root)
    apply(root)
    apply(root, change(PLAIN, new(PLAIN), old(PLAIN)))
    assert contents(root) == NEW | {PLAIN: old(PLAIN)}
    assert revert(root).reverted == PATHS
    assert tree(root) == before


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_not_as_expected_stops_everything(root: Path, path: str) -> None:
    edit(root / path)
    before = tree(root)
    with pytest.raises(ModifiedFileError, match=path) as caught:
        apply(root)
    assert caught.value.exit_code == 5
    assert tree(root) == before


def test_a_missing_file_stops_everything(root: Path) -> None:
    (root / PLAIN).unlink()
    before = tree(root)
    with pytest.raises(ModifiedFileError) as caught:
        apply(root)
    assert caught.value.code == "missing"
    assert tree(root) == before


def test_a_folder_that_is_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "vllm/config").rename(tmp_path / "elsewhere")
    (root / "vllm/config").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(NotWritableError) as caught:
        apply(root)
    assert caught.value.code == "linked-folder"
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "path", ["../x.py", "/etc/passwd", "vllm/../../x.py", "vllm/./x.py", "other/x.py", "vllm"]
)
def test_a_path_outside_of_the_package_is_refused(root: Path, path: str) -> None:
    with pytest.raises(ValueError, match="not distinct relative paths"):
        apply(root, Change(path, "0" * 64, b"", ()))


@pytest.mark.parametrize("when", ["link", "rename"])
def test_a_file_changed_during_the_run_stays_as_its_editor_left_it(root: Path, when: str) -> None:
    before = tree(root)

    def edit_plain(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("before", when) and path.name == "linked.py":
            edit(root / PLAIN)

    with stepping(edit_plain), pytest.raises(ModifiedFileError, match=PLAIN):
        apply(root)
    after = tree(root)
    assert (root / PLAIN).read_bytes() == b"edited"
    assert {name for name in before if before[name] != after.get(name)} == {PLAIN}
    assert after.keys() == before.keys()


def test_a_failing_check_rolls_everything_back(root: Path) -> None:
    before = tree(root)
    seen = []

    def check() -> None:
        seen.append(contents(root))
        failing()

    with pytest.raises(VerificationError, match="no module named torch") as caught:
        apply(root, check=check)
    assert caught.value.exit_code == 6
    assert seen == [NEW]
    assert tree(root) == before


def test_an_error_of_our_own_from_the_check_is_not_renamed(root: Path) -> None:
    before = tree(root)

    def check() -> None:
        raise UnsupportedError("not this", "nothing")

    with pytest.raises(UnsupportedError, match="not this"):
        apply(root, check=check)
    assert tree(root) == before


def test_the_check_sees_the_manifest_of_what_it_checks(root: Path) -> None:
    apply(root)
    seen = []
    apply(
        root,
        *(change(path, new(path), newer(path)) for path in PATHS),
        check=lambda: seen.append(read_manifest(root)),
    )
    assert seen == [read_manifest(root)]


def test_a_failing_check_of_another_apply_gets_back_to_the_first(root: Path) -> None:
    apply(root)
    before = tree(root)
    with pytest.raises(VerificationError):
        apply(root, *(change(path, new(path), newer(path)) for path in PATHS), check=failing)
    after = tree(root)
    assert {name for name in before if before[name] != after[name]} == {f"{STATE}/manifest.json"}
    assert before[f"{STATE}/manifest.json"][3] == after[f"{STATE}/manifest.json"][3]
    assert after.keys() == before.keys()


def test_what_a_disk_does_not_hold_is_rolled_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(root)

    def lose(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("after", "rename") and path.name == "plain.py":
            monkeypatch.setattr(
                "vllm_eagle3_patch.transaction.all_or_none.current_digest",
                lambda root, path: "other",
            )

    with stepping(lose), pytest.raises(VerificationError, match="does not hold what was written"):
        apply(root)
    monkeypatch.undo()
    assert tree(root) == before


def test_a_file_edited_after_apply_is_kept_aside_by_force(root: Path) -> None:
    before = tree(root)
    apply(root)
    edit(root / PLAIN)
    (kept,) = apply(root, change(PLAIN, b"edited", newer(PLAIN), keep_aside=True))
    assert (kept.path, (root / kept.copy).read_bytes()) == (PLAIN, b"edited")
    assert (root / PLAIN).read_bytes() == newer(PLAIN)
    edit(root / PLAIN, b"edited again")
    (kept_again,) = revert(root, force=True).kept_aside
    assert kept_again.copy != kept.copy
    assert (root / kept_again.copy).read_bytes() == b"edited again"
    after = tree(root)
    assert {name: after[name] for name in before} == before
    assert names(root / STATE) == {"README", "edited"}
    assert read_manifest(root) is None
    assert revert(root).reverted == ()
    apply(root)
    assert (root / kept.copy).read_bytes() == b"edited"


def test_revert_leaves_edited_files_and_their_originals(root: Path) -> None:
    apply(root)
    edit(root / PLAIN)
    for path in (LINKED, SYMLINK):
        edit(root / path, b"the next release")
    result = revert(root, Origins({sha256(b"the next release"), *PUBLISHED}))
    assert result.reverted == ()
    assert result.left_alone == (PLAIN,)
    assert (root / PLAIN).read_bytes() == b"edited"
    manifest = read_manifest(root)
    assert manifest is not None
    assert manifest.files.keys() == {PLAIN}
    assert original_bytes(root, manifest.files[PLAIN]) == old(PLAIN)
    assert {name for name in tree(root / STATE) if name.endswith(".py")} == {
        f"originals/1/{PLAIN}",
        f"copies/1/{PLAIN}",
    }
    before = tree(root)
    assert revert(root).left_alone == (PLAIN,)
    assert tree(root) == before


def test_revert_refuses_to_revert_a_part(root: Path) -> None:
    apply(root)
    edit(root / PLAIN)
    before = tree(root)
    with pytest.raises(ModifiedFileError, match=PLAIN):
        revert(root)
    assert tree(root) == before


def test_revert_passes_over_what_was_restored_by_hand(root: Path) -> None:
    before = tree(root)
    apply(root)
    edit(root / PLAIN, old(PLAIN))
    assert revert(root).reverted == (LINKED, SYMLINK)
    assert STATE not in names(root)
    assert {name for name in before if tree(root)[name] != before[name]} == {PLAIN}


def test_revert_drops_what_it_kept_of_another_vllm(root: Path) -> None:
    apply(root)
    for path in PATHS:
        edit(root / path, b"the next release")
    result = revert(root, Origins({sha256(b"the next release"), *PUBLISHED}))
    assert result.stale == PATHS
    assert set(contents(root).values()) == {b"the next release"}
    assert STATE not in names(root)


@pytest.mark.parametrize("gone", ["vllm", "vllm/config"])
def test_revert_when_vllm_is_removed_or_half_removed(root: Path, gone: str) -> None:
    apply(root)
    subprocess.run(["rm", "-r", root / gone], check=True)
    result = revert(root, Origins(PUBLISHED))
    assert set(result.stale) == {path for path in PATHS if path.startswith(gone)}
    assert all((root / path).read_bytes() == old(path) for path in result.reverted)
    assert not (root / gone).exists()
    assert STATE not in names(root)


@pytest.mark.parametrize("links", [True, False])
def test_revert_puts_a_deleted_file_back(root: Path, tmp_path: Path, links: bool) -> None:
    before = tree(tmp_path)
    apply(root)
    for path in (LINKED, SYMLINK):
        (root / path).unlink()
    if not links:
        for path in PATHS:
            (root / STATE / "originals/1" / path).unlink()
    planned = revert(root, dry_run=True)
    result = revert(root)
    assert result == planned
    assert result.reverted == PATHS
    assert result.stale == ()
    assert STATE not in names(root)
    assert contents(root) == OLD
    if links:
        assert tree(tmp_path) == before
    else:
        now, then = (root / LINKED).stat(), before[f"site-packages/{LINKED}"]
        assert (now.st_mode, now.st_mtime_ns) == (then[0], then[2])


def test_a_failing_revert_keeps_the_original_of_a_deleted_file(root: Path) -> None:
    apply(root)
    (root / LINKED).unlink()

    def fail(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("before", "rename") and path == root / PLAIN:
            filesystem.step = filesystem.go_on
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with stepping(fail), pytest.raises(NotWritableError):
        revert(root)
    assert unfinished(root) is None
    assert contents(root) == NEW | {LINKED: old(LINKED)}
    assert revert(root).reverted == (SYMLINK, PLAIN)
    assert contents(root) == OLD
    assert STATE not in names(root)


@pytest.mark.parametrize("place", [LINKED, "vllm/config"])
def test_revert_leaves_what_is_no_file_and_its_original(root: Path, place: str) -> None:
    apply(root)
    (root / place).rename(root / "elsewhere")
    (root / place).mkdir() if place == LINKED else (root / place).symlink_to(root / "elsewhere")
    result = revert(root, force=True)
    assert result.left_alone == tuple(path for path in PATHS if path.startswith(place))
    manifest = read_manifest(root)
    assert manifest is not None
    assert original_bytes(root, manifest.files[LINKED]) == old(LINKED)


def test_a_dry_run_of_revert_tells_the_same_and_writes_nothing(root: Path) -> None:
    apply(root)
    edit(root / PLAIN)
    before = tree(root)
    with stepping(not_to_be_called):
        planned = revert(root, dry_run=True, force=True)
        with pytest.raises(ModifiedFileError, match=PLAIN):
            revert(root, dry_run=True)
    assert planned.reverted == PATHS
    assert tree(root) == before
    assert revert(root, force=True) == planned


def not_to_be_called(moment: str, operation: str, path: Path) -> None:
    raise AssertionError(f"{operation} {path}")


def interrupt(root: Path, name: str = "plain.py") -> None:
    """Leave an ``apply`` as a power cut would when it has replaced the file of this name."""

    def lose_power(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("after", "rename") and path.name == name:
            os._exit(0)

    child = os.fork()
    if child == 0:
        with stepping(lose_power):
            apply(root)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_stale_entry_begins_anew(root: Path) -> None:
    apply(root)
    edit(root / PLAIN, b"the next release")
    (root / LINKED).unlink()
    apply(root, change(PLAIN, b"the next release", newer(PLAIN)), stale=(PLAIN, LINKED, SYMLINK))
    manifest = read_manifest(root)
    assert manifest is not None
    # The symbolic link's file is as we left it: that is not stale, whatever the caller thinks.
    assert manifest.files.keys() == {PLAIN, SYMLINK}
    entry = manifest.files[PLAIN]
    assert original_bytes(root, entry) == b"the next release"
    kept = {name for name in tree(root / STATE) if name.endswith(".py")}
    assert kept == {
        *(f"{shelf}/{entry.kept}/{PLAIN}" for shelf in ("originals", "copies")),
        *(f"{shelf}/1/{SYMLINK}" for shelf in ("originals", "copies")),
    }
    revert(root)
    assert (root / PLAIN).read_bytes() == b"the next release"
    assert (root / SYMLINK).read_bytes() == old(SYMLINK)
    assert STATE not in names(root)


def test_stale_entries_alone_are_dropped(root: Path) -> None:
    apply(root)
    subprocess.run(["rm", "-r", root / "vllm/config"], check=True)
    apply(root, change(PLAIN, new(PLAIN), new(PLAIN)), stale=(LINKED, SYMLINK))
    manifest = read_manifest(root)
    assert manifest is not None
    assert manifest.files.keys() == {PLAIN}


def test_an_interrupted_run_is_undone(root: Path) -> None:
    before = tree(root)
    interrupt(root)
    journal = unfinished(root)
    assert journal is not None
    assert journal.operation == "apply"
    assert contents(root) == NEW
    result = recover(root)
    assert result is not None
    assert result.outcome == "rolled-back"
    assert tree(root) == before


def test_an_interrupted_run_that_was_done_is_only_tidied_up(root: Path) -> None:
    interrupt(root, "concluded.json")
    result = recover(root)
    assert result is not None
    assert result.outcome == "completed"
    assert contents(root) == NEW
    assert recover(root) is None


def test_recovery_leaves_what_was_installed_after_the_interruption(root: Path) -> None:
    interrupt(root)
    edit(root / PLAIN, b"the next release")
    edit(root / LINKED, old(LINKED))
    (root / SYMLINK).unlink()
    result = recover(root)
    assert result is not None
    assert set(result.left_alone) == {PLAIN, SYMLINK}
    assert (root / PLAIN).read_bytes() == b"the next release"
    assert (root / LINKED).read_bytes() == old(LINKED)
    # Whatever it is, the originals that were replaced are not lost.
    manifest = read_manifest(root)
    assert manifest is not None
    assert manifest.files.keys() == {PLAIN, SYMLINK}
    assert original_bytes(root, manifest.files[PLAIN]) == old(PLAIN)
    revert(root, force=True)
    assert (root / PLAIN).read_bytes() == old(PLAIN)


def test_an_edit_before_the_swap_of_an_interrupted_run_is_no_concern_of_ours(root: Path) -> None:
    interrupt(root, "linked.py")
    edit(root / PLAIN)
    result = recover(root)
    assert result is not None
    assert result.left_alone == ()
    assert contents(root) == OLD | {PLAIN: b"edited"}
    assert STATE not in names(root)


def test_an_interrupted_run_whose_originals_are_lost_says_so(root: Path) -> None:
    interrupt(root)
    for shelf in ("originals", "copies"):
        (root / STATE / shelf / "1" / PLAIN).unlink()
        (root / STATE / shelf / "1" / PLAIN).write_bytes(b"damaged")
    with pytest.raises(StateCorruptError, match="gone or damaged"):
        recover(root)
    assert unfinished(root) is not None


def test_an_interrupted_revert_never_gives_up_the_only_original(root: Path) -> None:
    apply(root)

    def damage(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("after", "rename") and path == root / PLAIN:
            (root / STATE / "copies/1" / PLAIN).write_bytes(b"damaged")
            filesystem.step = LinksRefused()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with stepping(damage), pytest.raises(StateCorruptError, match="gone or damaged"):
        revert(root)
    assert (root / PLAIN).read_bytes() == old(PLAIN)


def test_a_failing_revert_of_a_file_with_its_original_content(root: Path) -> None:
    apply(root)
    apply(root, change(PLAIN, new(PLAIN), old(PLAIN)))
    before = tree(root)
    for operation in ("link", "rename"):
        for path in PATHS:

            def fail(moment: str, what: str, where: Path) -> None:
                name = Path(path).name  # noqa: B023
                if (moment, what) == ("before", operation) and where.name == name:  # noqa: B023
                    filesystem.step = filesystem.go_on
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

            with stepping(fail), pytest.raises(NotWritableError):
                revert(root)
            assert tree(root) == before


def test_recover_with_nothing_to_recover_writes_nothing(root: Path) -> None:
    assert points_of(lambda: recover(root)) == []
    apply(root)
    assert points_of(lambda: recover(root)) == []


def test_a_failing_roll_back_says_so_and_the_next_run_does_it(root: Path) -> None:
    before = tree(root)

    def fail(moment: str, operation: str, path: Path) -> None:
        if operation == "rename" and path.name == "plain.py":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if operation == "unlink":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with stepping(fail), pytest.raises(NotWritableError) as caught:
        apply(root)
    assert caught.value.code == "rollback-failed"
    assert "Input/output error" in caught.value.message
    assert "Read-only file system" in caught.value.message
    recover(root)
    assert tree(root) == before


def test_a_roll_back_that_lacks_memory_says_so_and_the_next_run_does_it(root: Path) -> None:
    before = tree(root)
    renamed: list[Path] = []

    def fail(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("before", "rename"):
            if path in renamed and path.is_relative_to(root / "vllm"):
                raise MemoryError
            renamed.append(path)

    with stepping(fail), pytest.raises(NotWritableError, match="MemoryError") as caught:
        apply(root, check=failing)
    assert caught.value.code == "rollback-failed"
    recover(root)
    assert tree(root) == before


def test_a_small_document_takes_little_memory(root: Path) -> None:
    apply(root)
    tracemalloc.start()
    try:
        assert read_manifest(root) is not None
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_failing_roll_back_of_a_failing_check_names_the_check(root: Path) -> None:
    def fail(moment: str, operation: str, path: Path) -> None:
        if operation == "unlink":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with stepping(fail), pytest.raises(NotWritableError, match="no module named torch"):
        apply(root, check=failing)
    assert unfinished(root) is not None


def test_a_run_that_lost_the_lock_touches_nothing_more(root: Path) -> None:
    def take_over(moment: str, operation: str, path: Path) -> None:
        if (moment, operation) == ("after", "rename") and path.name == "linked.py":
            (record,) = (root / lock.FOLDER).iterdir()
            record.unlink()

    with stepping(take_over), pytest.raises(BusyError, match="another run took over"):
        apply(root)
    assert contents(root) == OLD | {LINKED: new(LINKED)}
    recover(root)
    assert contents(root) == OLD


def test_data_is_on_disk_before_its_name_changes(root: Path) -> None:
    points = [
        (operation, path)
        for moment, operation, path in points_of(lambda: apply(root))
        if moment == "after"
    ]
    state = root / STATE

    def at(operation: str, path: Path, since: int = 0) -> int:
        return points.index((operation, path), since)

    def synced(operation: str, path: Path) -> int:
        """When a name is on disk: its folder was synced after it was made."""
        return at("fsync", path.parent, at(operation, path))

    swaps = [at("rename", root / path) for path in PATHS]
    created = [path for operation, path in points if operation == "create"]
    assert synced("rename", state / "journal.json") < min(swaps)
    for path, swap in zip(PATHS, swaps, strict=True):
        file = root / path
        (staged,) = (new for new in created if new.name.startswith(f".{file.name}."))
        assert staged.parent == file.parent
        copy, original = state / "copies/1" / path, state / "originals/1" / path
        for written in (staged, copy):
            assert at("write", written) < at("fsync", written) < min(swaps)
            assert synced("create", written) < min(swaps)
        assert synced("link", original) < min(swaps)
        assert synced("rename", file) == swap + 1
        for folder in list(copy.parents)[:4] + list(original.parents)[:4]:
            if folder not in (state, root):
                assert synced("mkdir", folder) < min(swaps)
    manifest, concluded = state / "manifest.json", state / "concluded.json"
    new_manifest = state / "manifest.json.new"
    assert max(swaps) < at("write", new_manifest) < at("fsync", new_manifest)
    assert at("fsync", new_manifest) < at("rename", manifest)
    assert synced("rename", manifest) < at("rename", concluded)
    assert synced("rename", concluded) < at("unlink", concluded)


def test_stale_bytecode_is_removed_for_every_interpreter(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "prefix"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(prefix))
    elsewhere = prefix.joinpath(*(root / "vllm").parts[1:])
    caches = [root / "vllm/__pycache__", elsewhere]
    ours = ["plain.cpython-38.pyc", "plain.cpython-313.opt-2.pyc", "plain.pypy39.pyc"]
    others = ["plain_too.cpython-38.pyc", "untouched.cpython-313.pyc", "plain.txt"]
    for run in (lambda: apply(root), lambda: revert(root)):
        for cache in caches:
            cache.mkdir(parents=True, exist_ok=True)
            for name in ours + others:
                (cache / name).write_bytes(b"bytecode")
        run()
        for cache in caches:
            assert names(cache) == set(others)


def test_bytecode_that_nobody_uses_unchecked_may_stay(root: Path) -> None:
    compiled = Path(py_compile.compile(str(root / "vllm/untouched.py")))
    cached = compiled.rename(compiled.with_name("plain.cpython-311.pyc"))

    def refuse(moment: str, operation: str, path: Path) -> None:
        if operation == "unlink" and path == cached:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with stepping(refuse):
        apply(root)
    assert contents(root) == NEW
    revert(root)
    py_compile.compile(
        str(root / "vllm/untouched.py"),
        str(cached),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    with stepping(refuse), pytest.raises(NotWritableError):
        apply(root)
    assert contents(root) == OLD


def test_a_linked_bytecode_folder_is_left_alone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.cpython-311.pyc").write_bytes(b"")
    (root / "vllm/__pycache__").symlink_to(tmp_path)
    apply(root)
    assert (tmp_path / "plain.cpython-311.pyc").exists()


@pytest.mark.parametrize("exclude", [b"", b"*.o\n", b"*.o", None])
def test_a_checkout_excludes_the_state_folder(root: Path, exclude: bytes | None) -> None:
    subprocess.run(["git", "init", "-q", root], check=True)
    file = root / ".git/info/exclude"
    file.unlink() if exclude is None else file.write_bytes(exclude)
    before = git_status(root)
    apply(root)
    assert git_status(root) == before
    assert file.read_bytes() == (exclude or b"") + BLOCK
    apply(root, change(PLAIN, new(PLAIN), newer(PLAIN)))
    assert file.read_bytes() == (exclude or b"") + BLOCK
    revert(root)
    assert file.read_bytes() == exclude if exclude else not file.exists()


def test_a_linked_worktree_excludes_the_state_folder(root: Path, tmp_path: Path) -> None:
    main = tmp_path / "main"
    subprocess.run(["git", "init", "-q", main], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    commit_empty = ["commit", "-q", "--allow-empty", "-m", "empty"]
    subprocess.run(["git", "-C", main, *author, *commit_empty], check=True)
    subprocess.run(["git", "-C", main, "worktree", "add", "-q", tmp_path / "tree"], check=True)
    (root / "vllm").rename(tmp_path / "tree/vllm")
    worktree = tmp_path / "tree"
    before = git_status(worktree)
    apply(worktree)
    assert git_status(worktree) == before
    assert BLOCK in (main / ".git/info/exclude").read_bytes()
    revert(worktree)
    assert BLOCK not in (main / ".git/info/exclude").read_bytes()


def git_status(root: Path) -> bytes:
    command = ["git", "-C", root, "status", "--porcelain"]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize(
    "git",
    [b"gitdir: elsewhere\n", b"gitdir: nowhere\n", b"no git file", b"link", b"linked exclude"],
)
def test_what_only_looks_like_a_checkout_is_left_alone(
    root: Path, tmp_path: Path, git: bytes
) -> None:
    info = root / "elsewhere/info"
    info.mkdir(parents=True)
    (info / "exclude").write_bytes(b"mine\n")
    if git == b"link":
        (root / ".git").symlink_to(root / "elsewhere")
    elif git == b"linked exclude":
        (root / ".git/info").mkdir(parents=True)
        (root / ".git/HEAD").touch()
        (root / ".git/info/exclude").symlink_to(info / "exclude")
    else:
        (root / ".git").write_bytes(git)
    apply(root)
    revert(root)
    assert (info / "exclude").read_bytes() == b"mine\n"
    assert names(info) == {"exclude"}


def test_the_readme_restores_by_hand(root: Path) -> None:
    before = tree(root)
    apply(root, change(LINKED))
    apply(root, change(PLAIN), change(SYMLINK))
    readme = (root / STATE / "README").read_text()
    commands = readme[readme.index("  for kept in") : readme.index("  done") + 6]
    subprocess.run(["sh", "-e", "-c", commands], cwd=root, check=True)
    after = tree(root)
    assert {name: after[name] for name in before} == before


def test_the_state_can_be_read_by_whoever_can_read_the_installation(root: Path) -> None:
    old_mask = os.umask(0o077)
    try:
        root.chmod(0o775)
        apply(root)
    finally:
        os.umask(old_mask)
    folders = [path for path in (root / STATE).rglob("*") if path.is_dir()]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folders}
    assert modes == {0o755}
    assert stat.S_IMODE((root / STATE / "manifest.json").stat().st_mode) == 0o644
    assert stat.S_IMODE((root / STATE / "copies/1" / LINKED).stat().st_mode) == 0o640


def test_a_path_with_anything_in_it(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/with space\nand newline \xff"))
    folder.mkdir()
    root = make_installation(folder)
    before = tree(root)
    apply(root)
    edit(root / PLAIN)
    with pytest.raises(ModifiedFileError):
        apply(root)
    revert(root, force=True)
    after = tree(root)
    assert {name: after[name] for name in before} == before


def test_a_missing_installation_is_an_error(tmp_path: Path) -> None:
    for run in (apply, revert, recover):
        with pytest.raises(NotReadableError, match="No such file"):
            run(tmp_path / "nowhere")
    assert read_manifest(tmp_path / "nowhere") is None
