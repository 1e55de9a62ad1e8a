"""The small calls that all changes are made of."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault_injection import points_of, stepping
from vllm_eagle3_patch.ground import filesystem
from vllm_eagle3_patch.ground.folder import Attributes, Folder
from vllm_eagle3_patch.ground.os_errors import explained, refused
from vllm_eagle3_patch.ground.text import one_line

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder.at(tmp_path) as opened:
        yield opened


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def write(folder: Folder, name: str, data: bytes = b"data", **attributes: object) -> None:
    filesystem.write_new_file(folder, name, data, Attributes(0o644, **attributes))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_modes_are_those_wanted_whatever_the_umask(folder: Folder, mask: int) -> None:
    before = os.umask(mask)
    try:
        filesystem.write_new_file(folder, "file", b"", Attributes(0o664))
        filesystem.make_directory(folder, "folder", 0o755)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder.path / "file").stat().st_mode) == 0o664
    assert stat.S_IMODE((folder.path / "folder").stat().st_mode) == 0o755


def test_no_file_is_made_that_runs_as_someone_else(folder: Folder) -> None:
    filesystem.write_new_file(folder, "file", b"", Attributes(0o7755))
    assert stat.S_IMODE((folder.path / "file").stat().st_mode) == 0o755


def test_a_file_is_written_whole_however_little_a_call_takes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:2]))
    write(folder, "file", b"seven b")
    assert (folder.path / "file").read_bytes() == b"seven b"


def test_a_new_file_never_takes_the_place_of_another(folder: Folder) -> None:
    write(folder, "file", b"first")
    (folder.path / "link").symlink_to("elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError) as caught:
            write(folder, name, b"second")
        assert caught.value.filename == str(folder.path / name)
    assert (folder.path / "file").read_bytes() == b"first"
    assert not (folder.path / "elsewhere").exists()


def test_times_owner_and_attributes_are_given(folder: Folder) -> None:
    status = folder.path.stat()
    owner = (status.st_uid, status.st_gid)
    write(folder, "file", times=(10**18, 2 * 10**18 + 1), owner=owner)
    snapshot = folder.snapshot("file")
    assert snapshot.attributes.times == (10**18, 2 * 10**18 + 1)
    assert snapshot.attributes.owner == owner


@as_root
def test_a_file_is_given_to_its_owner(folder: Folder) -> None:
    write(folder, "file", owner=(12345, 23456))
    assert folder.snapshot("file").attributes.owner == (12345, 23456)


def test_an_owner_that_may_not_be_given_is_passed_over_but_the_group_is_tried(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(descriptor: int, user: int, group: int) -> None:
        tried.append((user, group))
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    write(folder, "file", owner=(12345, 23456))
    assert tried == [(12345, 23456), (-1, 23456)]
    assert (folder.path / "file").read_bytes() == b"data"


def supports_attributes(path: Path) -> bool:
    try:
        os.setxattr(path, "user.test", b"1")
    except (OSError, AttributeError):
        return False
    os.removexattr(path, "user.test")
    return True


def test_extended_attributes_are_those_wanted_and_no_others(folder: Folder) -> None:
    if not supports_attributes(folder.path):
        pytest.skip("this file system has no extended attributes")
    write(folder, "file", extended={"user.a": b"1", "user.b": b"2"})
    assert folder.snapshot("file").attributes.extended == {"user.a": b"1", "user.b": b"2"}
    descriptor = os.open(folder.path / "file", os.O_RDWR)
    wanted = Attributes(0o644, extended={"user.b": b"3", "no-such-namespace.c": b""})
    filesystem.fill_file(descriptor, b"", wanted, folder.path / "file")
    os.close(descriptor)
    assert folder.snapshot("file").attributes.extended == {"user.b": b"3"}


def test_a_file_system_without_extended_attributes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("listxattr", "setxattr"):
        monkeypatch.setattr(os, name, refusing(errno.ENOTSUP), raising=False)
    write(folder, "file", extended={"user.a": b"1"})
    assert folder.snapshot("file").attributes.extended == {}


def test_a_second_name_is_that_of_a_link_itself(folder: Folder) -> None:
    (folder.path / "link").symlink_to("nowhere")
    write(folder, "file")
    for name in ("link", "file"):
        filesystem.link(folder, name, folder, f"second {name}")
        assert os.path.samestat(
            (folder.path / name).lstat(), (folder.path / f"second {name}").lstat()
        )


def test_a_copy_of_a_symbolic_link_has_its_time_and_owner(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = folder.path / "link"
    link.symlink_to("nowhere")
    os.utime(link, ns=(10**18, 10**18 + 1), follow_symlinks=False)
    if os.geteuid() == 0:
        os.chown(link, 12345, 23456, follow_symlinks=False)
    filesystem.copy_symlink(folder, "link", folder, "copy")
    copy, status = (folder.path / "copy").lstat(), link.lstat()
    assert (folder.path / "copy").readlink() == Path("nowhere")
    assert (copy.st_mtime_ns, copy.st_uid, copy.st_gid) == (
        10**18 + 1,
        status.st_uid,
        status.st_gid,
    )


def test_what_is_not_there_is_removed_already(folder: Folder) -> None:
    assert not filesystem.remove(folder, "nothing")
    assert not filesystem.remove_directory(folder, "nothing")
    assert not filesystem.remove_tree(folder, "nothing")


def test_a_directory_with_something_in_it_stays(folder: Folder) -> None:
    filesystem.make_directory(folder, "inner", 0o755)
    (folder.path / "inner/file").touch()
    assert not filesystem.remove_directory(folder, "inner")
    (folder.path / "inner/file").unlink()
    assert filesystem.remove_directory(folder, "inner")


def test_a_directory_that_is_filled_just_before_its_removal_stays(folder: Folder) -> None:
    filesystem.make_directory(folder, "inner", 0o755)

    def fill(moment: str, operation: str, path: Path) -> None:
        (path / "file").touch()

    with stepping(fill):
        assert not filesystem.remove_directory(folder, "inner")


def test_a_tree_is_removed_but_nothing_that_it_links_to(folder: Folder) -> None:
    (folder.path / "tree/inner").mkdir(parents=True)
    (folder.path / "outside").mkdir()
    write(folder, "outside/file".replace("outside/", ""))
    (folder.path / "tree/inner/file").touch()
    (folder.path / "tree/link").symlink_to(folder.path / "outside")
    (folder.path / "outside/kept").touch()
    assert filesystem.remove_tree(folder, "tree")
    assert folder.names() == ["file", "outside"]
    assert (folder.path / "outside/kept").exists()


def test_no_folder_is_opened_through_a_link(folder: Folder) -> None:
    (folder.path / "real/inner").mkdir(parents=True)
    (folder.path / "link").symlink_to("real")
    before = open_files()
    for path in ("link", "link/inner", "real/missing"):
        with pytest.raises(OSError, match=path.partition("/")[0]):
            folder.below(path)
    assert open_files() == before


def test_only_regular_files_of_a_bearable_size_are_read(folder: Folder) -> None:
    os.mkfifo(folder.path / "fifo")
    write(folder, "file")
    (folder.path / "link").symlink_to("file")
    before = open_files()
    with pytest.raises(OSError, match="not a regular file"):
        folder.snapshot("fifo")
    with pytest.raises(OSError, match="larger than 3"):
        folder.snapshot("file", limit=3)
    with pytest.raises(OSError, match="symbolic links"):
        folder.snapshot("link")
    assert folder.snapshot("link", follow=True).data == b"data"
    assert open_files() == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_directory_that_cannot_be_synced_is_no_error(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(number))
    filesystem.sync_directory(folder)


def test_a_directory_that_fails_to_be_synced_is_an_error(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        filesystem.sync_directory(folder)


def refusing(number: int) -> Callable[..., None]:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_every_change_is_announced_before_and_after(folder: Folder) -> None:
    def change() -> None:
        filesystem.make_directory(folder, "inner", 0o755)
        write(folder, "file", times=(1, 1))
        with folder.below("inner") as inner:
            filesystem.link(folder, "file", inner, "link")
            filesystem.replace(folder, "file", inner, "file")
            filesystem.sync_file(inner, "link")
            filesystem.sync_directory(inner)
            filesystem.remove(inner, "link")
            filesystem.remove(inner, "file")
        filesystem.remove_directory(folder, "inner")

    points = points_of(change)
    assert points[::2] == [("before", *point[1:]) for point in points[1::2]]
    assert [(operation, path.name) for moment, operation, path in points if moment == "after"] == [
        ("mkdir", "inner"),
        ("create", "file"),
        ("write", "file"),
        ("fchmod", "file"),
        ("utimensat", "file"),
        ("fsync", "file"),
        ("link", "link"),
        ("rename", "file"),
        ("fsync", "link"),
        ("fsync", "inner"),
        ("unlink", "link"),
        ("unlink", "file"),
        ("rmdir", "inner"),
    ]


def test_a_failure_right_after_a_file_was_made_leaves_it_closed(folder: Folder) -> None:
    def fail(moment: str, operation: str, path: Path) -> None:
        if moment == "after":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_files()
    with stepping(fail), pytest.raises(OSError, match="file"):
        write(folder, "file")
    assert open_files() == before


@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (errno.EACCES, "permission", "run it as|make it writable"),
        (errno.EPERM, "permission", "run it as|make it writable"),
        (errno.EROFS, "read-only", "remount"),
        (errno.ENOSPC, "disk-full", "free some space"),
        (errno.EDQUOT, "disk-full", "quota"),
        (errno.EMFILE, "open-files", "ulimit -n"),
        (errno.EIO, "io-error", "system's log"),
        (errno.ELOOP, "linked-folder", "--site-packages"),
        (errno.EBUSY, "not-writable", "mend what the system reports"),
    ],
)
def test_what_the_system_refuses_is_explained(
    tmp_path: Path, number: int, code: str, hint: str
) -> None:
    error = refused(OSError(number, os.strerror(number), str(tmp_path / "file")))
    assert (error.exit_code, error.code) == (7, code)
    assert error.message == f"{tmp_path}/file: {os.strerror(number)}"
    assert [word for word in hint.split("|") if word in error.hint]


@as_root
def test_who_may_not_write_is_told_who_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(errno.EACCES, "no", str(tmp_path / "not there/file"))
    os.chown(tmp_path, 0, 0)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert refused(denied).hint.endswith("belongs to root and you are user 54321: run it as root")
    os.chown(tmp_path, 54321, 0)
    assert "is yours (user 54321): make it writable" in refused(denied).hint


def test_an_error_without_a_path_is_explained_too() -> None:
    with pytest.raises(Exception, match="nothing known") as caught, explained():
        raise OSError("nothing known")
    assert caught.value.exit_code == 7  # type: ignore[attr-defined]
    assert "run it as the user" in refused(PermissionError(errno.EACCES, "no")).hint


def test_a_path_is_shown_on_one_line_and_can_be_printed() -> None:
    assert one_line("/usr/lib/vllm é") == "/usr/lib/vllm é"
    assert one_line(os.fsdecode(b"/a\nb\xff")) == "/a\\nb\\xff"
