"""What an earlier version of this tool left, met by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_tree import STATE, check_apply_check_diff, whole_tree

from command_line import run
from conftest import small_copy
from safety_table import Tried
from small_installation import apply, make_installation
from vllm_eagle3_patch.ground.digest import sha256
from vllm_eagle3_patch.transaction.change import Change
from vllm_eagle3_patch.transaction.state.documents import SCHEMA

GROUP = "Installations as they are"
STATES = Path(__file__).parents[1] / "states"
"""For each schema, installations of files that only look like vLLM's, as a version left them:
``installed`` with the state folder, and ``original``. They are never written anew: a change of
what is stored needs a new schema, and a folder for it."""
KEPT = sorted(STATES.glob("schema-*/*"))
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
SPECULATIVE = "vllm/config/speculative.py"


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """What git keeps of files: their bytes, and of what kind they are."""
    return {name: (node.content, node.mode & 0o170000) for name, node in whole_tree(root).items()}


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: f"{path.parent.name} {path.name}")
def test_the_state_of_every_schema_can_be_reverted(
    kept: Path, tmp_path: Path, tried: Tried
) -> None:
    root = tmp_path / "installed"
    shutil.copytree(kept / "installed", root, symlinks=True)
    assert contents(root) != contents(kept / "original")
    assert run("revert", "--site-packages", root).exit_code == 0
    assert contents(root) == contents(kept / "original")
    tried(
        GROUP,
        "the state folder of every earlier schema",
        how="state folders kept in `tests/states`: patched, patched twice, interrupted; revert",
        result="every original back",
    )


def test_there_is_a_state_of_this_schema_and_it_is_as_written_now(tmp_path: Path) -> None:
    kept = STATES / f"schema-{SCHEMA}"
    assert kept.is_dir(), "keep state folders of the new schema, too"
    root = make_installation(tmp_path)
    apply(root)
    now, then = (
        json.loads((folder / STATE / "manifest.json").read_bytes())
        for folder in (root, kept / "applied/installed")
    )
    assert now.keys() == then.keys()
    assert [file.keys() for file in now["files"][:2]] == [file.keys() for file in then["files"]]


def leave_as_an_earlier_version(root: Path, *, version: str) -> None:
    """Patch two files as a version with other patches would have."""
    changes = []
    for path in (DEEPSEEK, SPECULATIVE):
        before = (root / path).read_bytes()
        after = b"# vllm-eagle3-patch: an-old-patch\n" + before
        changes.append(Change(path, sha256(before), after, ("an-old-patch",)))
    apply(root, *changes, tool=version)


@pytest.mark.parametrize("then", ["apply", "revert"])
def test_an_earlier_version_with_other_patches(
    then: str, site_packages: Path, tmp_path: Path, tried: Tried
) -> None:
    before = whole_tree(site_packages)
    leave_as_an_earlier_version(site_packages, version="0.0.1")
    here = ("--site-packages", site_packages)
    checked = run("check", *here, "--json")
    assert (checked.exit_code, checked.document["state"]) == (1, "patchable")
    assert not checked.codes & {"state-corrupt", "modified", "stale-state"}
    if then == "apply":
        check_apply_check_diff(*here)
        afresh = small_copy("0.17.1", tmp_path / "afresh")
        check_apply_check_diff("--site-packages", afresh)
        for path in (DEEPSEEK, SPECULATIVE):
            assert (site_packages / path).read_bytes() == (afresh / path).read_bytes()
    assert run("revert", *here).exit_code == 0
    assert whole_tree(site_packages) == before
    tried(
        GROUP,
        "the tool upgraded between apply and revert",
        how="files and state as an earlier version with other patches left them; revert, or apply "
        "and revert",
        result="check says `patchable`; apply starts from the kept originals; after revert all as "
        "before",
    )


def test_only_the_version_of_the_tool_differs(site_packages: Path, tried: Tried) -> None:
    before = whole_tree(site_packages)
    here = ("--site-packages", site_packages)
    changed = check_apply_check_diff(*here)
    manifest = site_packages / STATE / "manifest.json"
    document = json.loads(manifest.read_bytes())
    document["tool"] = "0.0.1"
    manifest.write_text(json.dumps(document))
    # What that version wrote is what this one would write: it works, and there is nothing to do.
    patched = {path: (site_packages / path).read_bytes() for path in changed}
    assert run("check", *here).exit_code == 0
    assert run("apply", *here, "--json").document["changed"] == []
    assert {path: (site_packages / path).read_bytes() for path in changed} == patched
    assert run("revert", *here).exit_code == 0
    assert whole_tree(site_packages) == before
    tried(
        GROUP,
        "another version of the tool, with the same patches",
        how="`0.0.1` in the manifest; check, apply, revert",
        result="ready, nothing to do; after revert all as before",
    )


@pytest.mark.parametrize("then", ["apply --harden", "revert"])
@pytest.mark.parametrize("release", ["0.18.0", "0.33.0"])
def test_a_backup_of_what_an_earlier_run_left(
    release: str, then: str, tmp_path: Path, tried: Tried
) -> None:
    root = small_copy(release, tmp_path / "site-packages")
    before = whole_tree(root)
    here = ("--site-packages", root)
    run("apply", *here)
    shutil.copytree(root / "vllm", tmp_path / "backup")
    assert run("apply", "--harden", *here).exit_code == 0
    hardened = {path: node.content for path, node in whole_tree(root / "vllm").items()}
    # The package folder alone goes back to what the first run left: our folder is beside it.
    shutil.rmtree(root / "vllm")
    shutil.copytree(tmp_path / "backup", root / "vllm")
    checked = run("check", *here, "--json")
    patched = [file["path"] for file in checked.document["files"] if file["state"] == "patched"]
    assert SPECULATIVE in patched or release != "0.18.0"
    assert not checked.codes & {"modified", "no-original", "state-corrupt"}
    assert not any(
        path in problem["message"]
        for problem in checked.document["problems"]
        if problem["code"] == "stale-state"
        for path in patched
    )
    if then != "revert":
        assert run(*then.split(), *here).exit_code == 0
        again = {path: node.content for path, node in whole_tree(root / "vllm").items()}
        assert again == hardened
    assert run("revert", *here).exit_code == 0
    after = whole_tree(root)
    assert {p: n.content for p, n in after.items()} == {p: n.content for p, n in before.items()}
    tried(
        GROUP,
        "a backup of what an earlier run had left is restored over what a later one wrote",
        how="apply, copy of `vllm/`, `apply --harden`, the copy put back; `apply --harden` and "
        "revert, or revert",
        result="what is there is known as ours, and after revert it is the original",
    )
