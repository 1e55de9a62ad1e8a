"""vLLM installed by the real uv, in each of its link modes, and replaced while it is patched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from uv_environment import Uv, vllm_wheel
from whole_tree import STATE, check_apply_check_diff, revert_and_check, whole_tree

from command_line import run
from safety_table import Tried

GROUP = "Installations as they are"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
ONLY_0_17 = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {release: vllm_wheel(release, folder) for release in ("0.16.0", "0.17.1", "0.18.0")}


@pytest.fixture
def uv(tmp_path: Path) -> Uv:
    return Uv(tmp_path / "cache")


@pytest.mark.parametrize("mode", ["hardlink", "symlink", "clone", "copy"])
def test_the_cache_and_its_other_environments_stay_as_they_are(
    mode: str, uv: Uv, wheels: dict[str, Path], tmp_path: Path, tried: Tried
) -> None:
    first, second = uv.venv(tmp_path / "first"), uv.venv(tmp_path / "second")
    for environment in ("first", "second"):
        uv.install(tmp_path / environment, "--link-mode", mode, wheels["0.17.1"])
    file = first / DEEPSEEK
    if mode == "hardlink":
        assert file.stat().st_nlink == 3, "the cache's name and two environments'"
    assert file.is_symlink() == (mode == "symlink")
    archive = uv.cache / "archive-v0"
    before = {folder: whole_tree(folder) for folder in (archive, first, second)}
    original = file.read_bytes()
    where = ("--python", tmp_path / "first")
    changed = check_apply_check_diff(*where)
    patched = whole_tree(first)
    for path in changed:
        assert patched[path].inode != before[first][path].inode
        assert not (first / path).is_symlink()
    # What the state folder keeps may be the cache's own file, by one more name.
    for folder in (archive, second):
        now = whole_tree(folder)
        assert {n: replace(e, names=before[folder][n].names) for n, e in now.items()} == (
            before[folder]
        )
    third = uv.venv(tmp_path / "third")
    uv.install(tmp_path / "third", "--link-mode", mode, wheels["0.17.1"])
    assert (third / DEEPSEEK).read_bytes() == original
    assert run("check", "--python", tmp_path / "third").exit_code == 1
    uv.run("venv", "--clear", tmp_path / "third")
    revert_and_check(*where)
    assert {folder: whole_tree(folder) for folder in before} == before
    tried(
        GROUP,
        f"installed by uv with `--link-mode {mode}`",
        how="real `uv venv` and `uv pip install`; check, apply, check, diff, revert",
        result="uv's cache untouched to the inode, other environments too; after revert all as "
        "before, inodes and links included",
    )


@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_reinstalled_while_patched(
    mode: str, uv: Uv, wheels: dict[str, Path], tmp_path: Path, tried: Tried
) -> None:
    site = uv.venv(tmp_path / "venv")
    install = ("--link-mode", mode, wheels["0.17.1"])
    uv.install(tmp_path / "venv", *install)
    here = ("--site-packages", site)
    for again in ("apply", "revert"):
        check_apply_check_diff(*here)
        uv.install(tmp_path / "venv", "--reinstall", *install)
        fresh = {n: e.content for n, e in whole_tree(site).items() if not n.startswith(STATE)}
        checked = run("check", *here, "--json")
        assert (checked.exit_code, checked.document["state"]) == (1, "patchable")
        assert "stale-state" in checked.codes
        if again == "apply":
            check_apply_check_diff(*here)
            assert "stale-state" not in run("check", *here, "--json").codes
        reverted = run("revert", *here, "--json")
        assert reverted.exit_code == 0
        assert bool(reverted.document["changed"]) == (again == "apply")
        assert {n: e.content for n, e in whole_tree(site).items()} == fresh
    tried(
        GROUP,
        "vLLM reinstalled while patched",
        how="real `uv pip install --reinstall`, as hard links and as copies; then apply and "
        "revert, or revert alone",
        count=2,
        result="check says `stale-state`; apply starts afresh; revert leaves the new files alone "
        "and removes what was kept",
    )


@pytest.mark.parametrize(("release", "what"), [("0.18.0", "upgraded"), ("0.16.0", "downgraded")])
def test_another_release_installed_while_patched(
    release: str, what: str, uv: Uv, wheels: dict[str, Path], tmp_path: Path, tried: Tried
) -> None:
    site = uv.venv(tmp_path / "venv")
    here = ("--site-packages", site)
    for then in ("apply", "revert"):
        uv.install(tmp_path / "venv", "--reinstall", wheels["0.17.1"])
        changed = check_apply_check_diff(*here)
        assert ONLY_0_17 in changed
        uv.install(tmp_path / "venv", wheels[release])
        # What 0.17.1 alone had: someone else's file keeps its folder alive.
        (site / ONLY_0_17).parent.mkdir(parents=True, exist_ok=True)
        (site / "vllm/v1/worker/gpu/spec_decode/eagle/other.txt").touch()
        fresh = {n: e.content for n, e in whole_tree(site).items() if not n.startswith(STATE)}
        checked = run("check", *here, "--json")
        assert checked.exit_code == 1
        assert checked.document["release"]["name"] == release
        (stale,) = [p for p in checked.document["problems"] if p["code"] == "stale-state"]
        assert all(path in stale["message"] for path in changed)
        if then == "apply":
            check_apply_check_diff(*here)
            after = run("check", *here, "--json")
            assert "stale-state" not in after.codes, "nothing of the other release is kept"
        assert run("revert", *here).exit_code == 0
        assert {n: e.content for n, e in whole_tree(site).items()} == fresh
    tried(
        GROUP,
        f"vLLM {what} while patched",
        how=f"real `uv pip install` of {release} over a patched 0.17.1; then apply and revert, or "
        "revert alone",
        count=2,
        result="check says `stale-state`; apply starts afresh; revert puts no file of the other "
        "release back",
    )


@pytest.mark.parametrize("remnant", [False, True])
def test_removed_while_patched(
    remnant: bool, uv: Uv, wheels: dict[str, Path], tmp_path: Path, tried: Tried
) -> None:
    site = uv.venv(tmp_path / "venv")
    empty = whole_tree(site)
    uv.install(tmp_path / "venv", wheels["0.17.1"])
    check_apply_check_diff("--site-packages", site)
    uv.uninstall(tmp_path / "venv", "vllm")
    if remnant:
        (site / DEEPSEEK).parent.mkdir(parents=True)
        (site / DEEPSEEK).with_name("mine.py").touch()
        empty = {n: e for n, e in whole_tree(site).items() if not n.startswith(STATE)}
    for where in (("--site-packages", site), ("--python", tmp_path / "venv")):
        for command in ("check", "apply", "diff"):
            ended = run(command, *where)
            assert ended.exit_code == 3
            message, hint = ended.stderr.splitlines()
            assert f"{site / STATE} is left of one that was patched" in message
            assert hint.endswith(f"vllm-eagle3-patch revert --site-packages {site}")
    planned = run("revert", "--site-packages", site, "--dry-run", "--json")
    assert (planned.exit_code, planned.document["changed"]) == (0, [])
    assert (site / STATE).is_dir()
    where = ("--site-packages", site) if remnant else ("--python", tmp_path / "venv")
    ended = run("revert", *where)
    assert ended.exit_code == 0
    assert "no vLLM is there any more" in ended.stdout
    assert whole_tree(site) == empty
    assert run("revert", *where).exit_code == 3
    how = ", something else left in its folder" if remnant else ""
    tried(
        GROUP,
        "vLLM removed while patched",
        how=f"real `uv pip uninstall vllm`{how}",
        result="exit 3 names the folder that is left and the command that removes it; revert "
        "removes it and puts nothing back",
    )


def test_revert_in_an_active_environment_tidies_up_too(
    uv: Uv, wheels: dict[str, Path], tmp_path: Path
) -> None:
    site = uv.venv(tmp_path / "venv")
    empty = whole_tree(site)
    uv.install(tmp_path / "venv", wheels["0.17.1"])
    active = {"VIRTUAL_ENV": str(tmp_path / "venv")}
    check_apply_check_diff(env=active)
    uv.uninstall(tmp_path / "venv", "vllm")
    assert run("apply", env=active).exit_code == 3
    assert run("revert", env=active).exit_code == 0
    assert whole_tree(site) == empty
