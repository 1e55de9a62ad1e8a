"""Editable installations of a git checkout in which someone is at work."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_tree import STATE, check_apply_check_diff, revert_and_check, whole_tree

import fake_environments as fake
from command_line import run
from conftest import small_copy
from safety_table import Tried

GROUP = "Installations as they are"
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
Install = Callable[[Path, Path], Path]
KINDS = [
    pytest.param(fake.install_editable_path, id="path"),
    pytest.param(fake.install_editable_hook, id="import hook"),
]


def git(checkout: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.autocrlf=false")
    command = ["git", "-C", str(checkout), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone in which a file was changed, one was added and one was staged."""
    root = small_copy("0.17.1", tmp_path / "check out")
    (info,) = root.glob("*.dist-info")
    subprocess.run(["rm", "-r", info], check=True)
    (root / "pyproject.toml").write_text("[project]\nname = 'vllm'\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "as released")
    (root / "vllm/__init__.py").write_text("# being worked on\n")
    (root / "notes.txt").write_text("not added\n")
    (root / "staged.txt").write_text("staged\n")
    git(root, "add", "staged.txt")
    return root


@pytest.mark.parametrize("install", KINDS)
def test_only_the_patched_files_show_in_git_status(
    install: Install, checkout: Path, tmp_path: Path, tried: Tried
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    install(site, checkout)
    dirty = git(checkout, "status", "--porcelain").splitlines()
    assert len(dirty) == 3
    before = whole_tree(tmp_path)
    where = ("--site-packages", site)
    changed = check_apply_check_diff(*where)
    assert (checkout / STATE).is_dir()
    status = git(checkout, "status", "--porcelain").splitlines()
    assert sorted(status) == sorted([*dirty, *(f" M {path}" for path in changed)])
    assert f"/{STATE}*/" in (checkout / ".git/info/exclude").read_text()
    revert_and_check(*where)
    assert git(checkout, "status", "--porcelain").splitlines() == dirty
    after = whole_tree(tmp_path)
    # Asking git for its status rewrites its index; the list of what is excluded is a new file.
    index, exclude = "check out/.git/index", "check out/.git/info/exclude"
    assert after.pop(exclude).content == before.pop(exclude).content
    assert {**after, index: None} == {**before, index: None}
    tried(
        GROUP,
        "editable installation of a git checkout with changes in it, by a path and by an import "
        "hook",
        how="real `git init`, one file changed, one staged, one not added; check, apply, check, "
        "diff, revert",
        result="git status shows the patched files and what it showed before; nothing of ours; "
        "after revert all as before",
    )


@pytest.mark.parametrize("how", ["stash", "checkout -- .", "reset --hard"])
def test_git_takes_the_patch_out(how: str, checkout: Path, tried: Tried) -> None:
    where = ("--site-packages", checkout)
    changed = check_apply_check_diff(*where)
    git(checkout, *how.split())
    if how == "stash":
        git(checkout, "stash", "pop")
        assert run("check", *where).exit_code == 0
        git(checkout, "stash")
    status = git(checkout, "status", "--porcelain")
    before = {path: (checkout / path).read_bytes() for path in changed}
    checked = run("check", *where, "--json")
    assert (checked.exit_code, checked.document["state"]) == (1, "patchable")
    (stale,) = [p for p in checked.document["problems"] if p["code"] == "stale-state"]
    assert all(path in stale["message"] for path in changed)
    assert "restored" in stale["hint"]
    check_apply_check_diff(*where)
    git(checkout, "checkout", "--", *changed)
    assert run("revert", *where).exit_code == 0
    assert not (checkout / STATE).exists()
    assert git(checkout, "status", "--porcelain") == status
    assert {path: (checkout / path).read_bytes() for path in changed} == before
    assert "stale-state" not in run("check", *where, "--json").codes
    tried(
        GROUP,
        "git takes the patch out of a checkout",
        how="`git stash`, `git checkout -- .` and `git reset --hard` while patched",
        result="check says `stale-state`; apply patches again; revert tidies up, writes nothing",
    )
