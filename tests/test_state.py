"""What is read from the state folder, whoever wrote it."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fault_injection import points_of
from safety_table import Tried
from small_installation import (
    LINKED,
    OLD,
    PATHS,
    PLAIN,
    SYMLINK,
    apply,
    contents,
    make_installation,
    old,
    revert,
    tree,
)
from vllm_eagle3_patch.commands.revert import revert as revert_command
from vllm_eagle3_patch.ground.errors import (
    NotReadableError,
    PatchError,
    StateCorruptError,
    UnsafeStateError,
)
from vllm_eagle3_patch.ground.folder import Folder
from vllm_eagle3_patch.installation.find import Where
from vllm_eagle3_patch.transaction.recovery import recover
from vllm_eagle3_patch.transaction.state import layout
from vllm_eagle3_patch.transaction.state.documents import safe_path
from vllm_eagle3_patch.transaction.state.journal import (
    APPLY,
    Journal,
    Replacement,
    journal_in,
    unfinished,
)
from vllm_eagle3_patch.transaction.state.manifest import (
    Manifest,
    lost_originals,
    manifest_bytes,
    original_bytes,
    read_manifest,
)

Damage = Callable[[dict[str, Any]], object]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_installation(tmp_path)
    apply(root)
    return root


@pytest.fixture
def state(root: Path) -> Path:
    return root / layout.FOLDER


def entry(document: dict[str, Any]) -> dict[str, Any]:
    found = document["files"][0]
    assert isinstance(found, dict)
    return found


def test_no_state_is_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert unfinished(tmp_path) is None


def test_reading_writes_nothing(root: Path) -> None:
    manifest = read_manifest(root)
    assert manifest is not None

    def read() -> None:
        read_manifest(root)
        unfinished(root)
        original_bytes(root, manifest.files[PLAIN])

    assert points_of(read) == []


def test_a_manifest_comes_back_as_it_was_written(root: Path, state: Path) -> None:
    manifest = read_manifest(root)
    assert manifest is not None
    assert manifest_bytes(manifest) == (state / "manifest.json").read_bytes()


def test_a_journal_comes_back_as_it_was_written(root: Path, state: Path) -> None:
    manifest = read_manifest(root)
    file = Replacement(PLAIN, "0" * 64, "1" * 64, aside=True)
    journal = Journal(APPLY, "1.0", 2, None, manifest, (file,))
    (state / "journal.json").write_bytes(journal.encoded())
    assert unfinished(root) == journal
    (state / "journal.json").rename(state / "concluded.json")
    assert unfinished(root) == journal


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"[]",
        b'{"schema": true}',
        b'{"schema": 0}',
        b'{"schema": 1}',
        b'{"schema": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "journal.json", "concluded.json"])
def test_what_is_no_document_of_ours_is_corrupt(
    root: Path, state: Path, name: str, data: bytes
) -> None:
    (state / name).write_bytes(data)
    before = tree(root)
    for command in (read_manifest if name == "manifest.json" else unfinished, revert, apply):
        with pytest.raises(StateCorruptError) as caught:
            command(root)
        assert (caught.value.exit_code, caught.value.code) == (5, "state-corrupt")
        assert name in caught.value.message
        assert "README" in caught.value.hint
    assert tree(root) == before


def test_every_truncation_of_a_manifest_is_corrupt(root: Path, state: Path) -> None:
    data = (state / "manifest.json").read_bytes()
    for length in range(0, len(data) - 1, 7):
        (state / "manifest.json").write_bytes(data[:length])
        with pytest.raises(StateCorruptError):
            read_manifest(root)


def test_a_newer_schema_is_not_guessed_at(root: Path, state: Path) -> None:
    damage(state, lambda document: document.update(schema=2))
    with pytest.raises(StateCorruptError, match="schema 2") as caught:
        read_manifest(root)
    assert caught.value.code == "state-newer"
    assert "use that version" in caught.value.hint


def damage(state: Path, how: Damage, name: str = "manifest.json") -> None:
    document = json.loads((state / name).read_bytes())
    how(document)
    (state / name).write_text(json.dumps(document))


PATHS_OUTSIDE = [
    "/etc/passwd",
    "../vllm/plain.py",
    "vllm/../../plain.py",
    "vllm/./plain.py",
    "vllm//plain.py",
    "vllm/",
    "vllm",
    "",
    "other/plain.py",
    "vllm/a\0b.py",
    "vllm/..",
]


@pytest.mark.parametrize(
    "how",
    [
        *(
            pytest.param(lambda d, p=path: entry(d).update(path=p), id=f"path {path!r}")
            for path in PATHS_OUTSIDE
        ),
        pytest.param(lambda d: entry(d).update(kept="../../x"), id="kept outside"),
        pytest.param(lambda d: entry(d).update(kept=-1), id="kept negative"),
        pytest.param(lambda d: entry(d).update(kept=True), id="kept no number"),
        pytest.param(lambda d: entry(d).update(kept=2**63), id="kept too large"),
        pytest.param(lambda d: entry(d).update(original="0"), id="no digest"),
        pytest.param(lambda d: entry(d).update(written=None), id="digest null"),
        pytest.param(lambda d: entry(d).update(mode=2**40), id="mode too large"),
        pytest.param(lambda d: entry(d).update(mode=6.0), id="mode no number"),
        pytest.param(lambda d: entry(d).update(user=2**32), id="user too large"),
        pytest.param(lambda d: entry(d).update(changed_ns=10**30), id="time too large"),
        pytest.param(lambda d: entry(d).update(patches="a-patch"), id="patches no list"),
        pytest.param(lambda d: entry(d).update(patches=[1]), id="patches no names"),
        pytest.param(lambda d: entry(d).pop("symlink"), id="symlink missing"),
        pytest.param(lambda d: entry(d).update(symlink=1), id="symlink no text"),
        pytest.param(lambda d: d["files"].append(entry(d)), id="path twice"),
        pytest.param(lambda d: d["files"].append(None), id="entry null"),
        pytest.param(lambda d: d.update(files={}), id="files no list"),
        pytest.param(lambda d: d.update(tool=None), id="tool null"),
        pytest.param(lambda d: d.pop("release"), id="release missing"),
        pytest.param(lambda d: d.update(schema="1"), id="schema no number"),
    ],
)
def test_a_forged_manifest_is_corrupt_and_nothing_is_written(
    root: Path, state: Path, how: Damage
) -> None:
    damage(state, how)
    before = tree(root)
    for command in (read_manifest, revert, apply):
        with pytest.raises(StateCorruptError, match="is damaged"):
            command(root)
    assert tree(root) == before


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda d: d.update(operation="destroy"), id="operation"),
        pytest.param(lambda d: d.update(token="../x"), id="token"),
        pytest.param(lambda d: d.update(token=""), id="no token"),
        pytest.param(lambda d: d.update(token="0123abcd\n"), id="token and a line"),
        pytest.param(lambda d: d.update(token="0123ABCD"), id="token in capitals"),
        pytest.param(lambda d: d.update(token=12345678), id="token a number"),
        pytest.param(lambda d: d["files"].append(entry(d)), id="path twice"),
        pytest.param(lambda d: d["files"].append(entry(d) | {"after": "2" * 64}), id="path again"),
        pytest.param(lambda d: d["after"].update(schema=2), id="manifest newer"),
        pytest.param(lambda d: d["after"].update(schema=0), id="manifest of no schema"),
        pytest.param(lambda d: d["after"].pop("schema"), id="manifest without schema"),
        pytest.param(lambda d: d.update(before=d["after"] | {"schema": 2}), id="former newer"),
        pytest.param(lambda d: d.update(run="1"), id="run"),
        pytest.param(lambda d: d.update(after=None), id="no manifest"),
        pytest.param(lambda d: d.update(after=1), id="manifest no object"),
        pytest.param(lambda d: entry(d).update(path="vllm/other.py"), id="not in the manifest"),
        pytest.param(lambda d: entry(d).update(path="../x"), id="outside"),
        pytest.param(lambda d: entry(d).update(aside=1), id="aside"),
    ],
)
def test_a_forged_journal_is_corrupt_and_nothing_is_written(
    root: Path, state: Path, how: Damage, tried: Tried
) -> None:
    file = Replacement(PLAIN, "0" * 64, "1" * 64)
    journal = Journal(APPLY, "1.0", 2, None, read_manifest(root), (file,))
    (state / "journal.json").write_bytes(journal.encoded())
    damage(state, how, "journal.json")
    before = tree(root)
    for command in (unfinished, recover, revert, apply):
        with pytest.raises(StateCorruptError, match="is damaged"):
            command(root)
    assert tree(root) == before
    tried(
        "Hostile or bad input",
        "a forged journal",
        how="its operation, token, run, paths (outside, twice, unknown) or manifests (schema); "
        "check, recovery, apply and revert",
        count=4,
        result="state-corrupt (5), nothing written",
    )


def test_a_manifest_that_is_gone_is_corrupt_not_absent(root: Path, state: Path) -> None:
    (state / "manifest.json").unlink()
    before = tree(root)
    for command in (read_manifest, revert, apply):
        with pytest.raises(StateCorruptError, match=r"manifest\.json is gone"):
            command(root)
    assert tree(root) == before


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "large"])
def test_a_manifest_that_is_no_file_of_ours_is_corrupt(
    root: Path, state: Path, tmp_path: Path, kind: str
) -> None:
    manifest = state / "manifest.json"
    manifest.rename(tmp_path / "manifest.json")
    if kind == "link":
        manifest.symlink_to(tmp_path / "manifest.json")
    elif kind == "fifo":
        os.mkfifo(manifest)
    elif kind == "folder":
        manifest.mkdir()
    else:
        manifest.touch()
        os.truncate(manifest, 2**30)
    with pytest.raises(StateCorruptError, match=r"manifest\.json is damaged"):
        read_manifest(root)


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_a_state_folder_that_is_no_folder_is_refused(
    root: Path, state: Path, tmp_path: Path, kind: str
) -> None:
    shutil.rmtree(state)
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        state.touch()
    else:
        state.symlink_to(tmp_path / ("nowhere" if "dangling" in kind else "elsewhere"))
    before = tree(tmp_path)
    for command in (read_manifest, unfinished, recover, revert, apply):
        with pytest.raises(UnsafeStateError) as caught:
            command(root)
        assert caught.value.code == "state-unsafe"
    assert tree(tmp_path) == before


@pytest.mark.parametrize("shelf", ["originals", "copies", "edited", "previous"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_shelf_that_is_no_folder_is_refused(
    root: Path, state: Path, tmp_path: Path, shelf: str, kind: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    if (state / shelf).exists():
        (state / shelf).rename(tmp_path / "elsewhere/kept")
    (state / shelf).symlink_to(tmp_path) if kind == "link" else (state / shelf).touch()
    before = tree(tmp_path)
    for command in (read_manifest, unfinished, recover, revert, apply):
        with pytest.raises(UnsafeStateError, match=f"{shelf} is not a folder"):
            command(root)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("shelf", ["originals/1", "copies/1/vllm"])
def test_a_link_in_the_state_folder_leads_nowhere(
    root: Path, state: Path, tmp_path: Path, shelf: str
) -> None:
    (state / shelf).rename(tmp_path / "elsewhere")
    (state / shelf).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    # What it leads to is not used: of the two that are kept, the other one is.
    manifest = read_manifest(root)
    assert manifest is not None
    assert original_bytes(root, manifest.files[PLAIN]) == old(PLAIN)
    revert(root)
    assert contents(root) == OLD
    assert not state.exists()
    assert tree(tmp_path / "elsewhere") == before


@as_root
def test_root_trusts_the_state_of_root_and_of_the_installations_owner(
    root: Path, state: Path
) -> None:
    os.chown(state, 12345, 12345)
    for command in (read_manifest, unfinished, recover, revert, apply):
        with pytest.raises(UnsafeStateError, match="belongs to user 12345") as caught:
            command(root)
        assert "run it as user 12345" in caught.value.hint
    os.chown(root, 12345, 12345)
    assert read_manifest(root) is not None
    os.chown(state, 0, 0)
    assert read_manifest(root) is not None


def test_other_users_read_whatever_state_there_is(
    root: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(state, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert read_manifest(root) is not None


def test_a_state_that_may_not_be_read_is_not_read_as_none(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Folder, name: str, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder.path / name))

    monkeypatch.setattr(Folder, "snapshot", refuse)
    for command in (read_manifest, unfinished):
        with pytest.raises(NotReadableError) as caught:
            command(root)
        assert caught.value.code == "permission"


@pytest.mark.parametrize("path", PATHS)
def test_originals_come_from_the_copy_if_need_be(root: Path, state: Path, path: str) -> None:
    manifest = read_manifest(root)
    assert manifest is not None
    entry = manifest.files[path]
    (state / "originals/1" / path).unlink()
    (state / "originals/1" / path).write_bytes(b"damaged")
    assert original_bytes(root, entry) == old(path)
    (state / "copies/1" / path).write_bytes(b"damaged")
    with pytest.raises(StateCorruptError, match="gone or damaged") as caught:
        original_bytes(root, entry)
    assert "reinstall vLLM" in caught.value.hint
    shutil.rmtree(state)
    with pytest.raises(StateCorruptError):
        original_bytes(root, entry)


def test_a_symbolic_link_that_leads_elsewhere_now_is_not_trusted(
    root: Path, state: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    link = state / "originals/1" / SYMLINK
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    revert(root)
    assert contents(root) == OLD
    assert not (root / SYMLINK).is_symlink()


def test_a_forged_mode_gives_nobody_more_rights(root: Path, state: Path) -> None:
    damage(state, lambda document: [e.update(mode=0o6755) for e in document["files"]])
    for path in PATHS:
        (state / "originals/1" / path).unlink()
    revert(root)
    for path in (LINKED, PLAIN):
        assert stat.S_IMODE((root / path).stat().st_mode) == 0o755


def test_a_recovery_of_a_revert_whose_previous_files_are_gone_says_so(
    root: Path, state: Path
) -> None:
    manifest = read_manifest(root)
    assert manifest is not None
    one = manifest.files[PLAIN]
    journal = Journal(
        "revert", "1.0", 2, manifest, None, (Replacement(PLAIN, one.written, one.original),)
    )
    (state / "journal.json").write_bytes(journal.encoded())
    shutil.copy2(state / "copies/1" / PLAIN, root / PLAIN)
    with pytest.raises(StateCorruptError, match="gone or damaged"):
        recover(root)


def damage_manifest(root: Path, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = root / layout.FOLDER
    if problem == "state-newer":
        damage(state, lambda document: document.update(schema=2))
    elif problem == "state-corrupt":
        (state / "manifest.json").unlink()
    else:
        real = Folder.snapshot

        def refuse(folder: Folder, name: str, **options: Any) -> Any:
            if name == "manifest.json":
                raise PermissionError(13, "Permission denied", str(folder.path / name))
            return real(folder, name, **options)

        monkeypatch.setattr(Folder, "snapshot", refuse)


@pytest.mark.parametrize(
    ("problem", "exit_code"), [("state-newer", 5), ("state-corrupt", 5), ("permission", 7)]
)
def test_the_revert_command_says_what_keeps_the_state_from_being_read(
    root: Path, problem: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "vllm/__init__.py").touch()
    model = root / "vllm/model_executor/models/deepseek_v2.py"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"class DeepseekV2Model: pass  # vllm-eagle3-patch: deepseek-v2\n")
    damage_manifest(root, problem, monkeypatch)
    before = tree(root)
    with pytest.raises(PatchError) as caught:
        revert_command(Where(site_packages=root))
    assert (caught.value.code, caught.value.exit_code) == (problem, exit_code)
    assert tree(root) == before


def forget(state: Path, path: str) -> None:
    """Remove an entry from a manifest, as by hand."""
    damage(
        state,
        lambda document: document.update(files=[e for e in document["files"] if e["path"] != path]),
    )


@pytest.mark.parametrize("linked", [True, False])
def test_revert_never_removes_an_original_that_the_manifest_does_not_name(
    root: Path, state: Path, linked: bool
) -> None:
    forget(state, PLAIN)
    if not linked:
        (state / "originals/1" / PLAIN).unlink()
    planned = revert(root, dry_run=True)
    result = revert(root)
    assert result == planned
    assert result.reverted == (LINKED, SYMLINK)
    shelf = "originals" if linked else "copies"
    assert result.unclaimed == (f"{layout.FOLDER}/{shelf}/1/{PLAIN}",)
    assert (root / result.unclaimed[0]).read_bytes() == old(PLAIN)
    # The state stays one that can be read, and a second time changes nothing.
    before = tree(root)
    assert revert(root).unclaimed == result.unclaimed
    assert tree(root) == before
    # Put back by hand, nothing is left to keep.
    (root / result.unclaimed[0]).replace(root / PLAIN)
    (state / "copies/1" / PLAIN).unlink(missing_ok=True)
    revert(root)
    assert contents(root) == OLD
    assert not state.exists()


def test_the_revert_command_names_what_the_manifest_does_not(root: Path, state: Path) -> None:
    (root / "vllm/__init__.py").touch()
    forget(state, PLAIN)
    report = revert_command(Where(site_packages=root))
    assert any(f"originals/1/{PLAIN}" in note for note in report.notes)


def test_a_lost_original_is_found_without_reading_it(root: Path, state: Path) -> None:
    manifest = read_manifest(root)
    assert manifest is not None
    assert lost_originals(root, manifest) == ()
    (state / "originals/1" / PLAIN).unlink()
    (state / "copies/1" / SYMLINK).unlink()
    assert lost_originals(root, manifest) == ()
    (state / "copies/1" / PLAIN).unlink()
    assert lost_originals(root, manifest) == (PLAIN,)
    shutil.rmtree(state)
    assert lost_originals(root, manifest) == PATHS


def test_paths_in_the_package_are_safe() -> None:
    assert all(map(safe_path, [*PATHS, "vllm/a b/..c.py", "vllm/.hidden/é\n.py"]))


def test_a_manifest_knows_what_it_holds(root: Path) -> None:
    manifest = read_manifest(root)
    assert isinstance(manifest, Manifest)
    with Folder.at(root / layout.FOLDER) as state:
        assert journal_in(state) is None
