"""What a user is told when files are not as they should be, before and after ``--force``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import run, snapshot
from safety_table import Tried

EAGLE = "vllm/v1/spec_decode/eagle.py"
SPECULATIVE = "vllm/config/speculative.py"
EDIT = b"\n# mine\n"
GROUP = "What users see"


def edit(site_packages: Path, path: str) -> bytes:
    """Edit a file as an editor does that writes a new one; returns its bytes."""
    file = site_packages / path
    edited = file.read_bytes() + EDIT
    file.unlink()
    file.write_bytes(edited)
    return edited


def notes(*arguments: object) -> list[str]:
    found = run(*arguments, "--json").document["notes"]
    assert isinstance(found, list)
    return found


def test_apply_by_force_says_what_it_builds_upon(site_packages: Path, tried: Tried) -> None:
    where = ("--site-packages", site_packages)
    edited = edit(site_packages, EAGLE)
    refused = run("apply", *where)
    assert refused.exit_code == 5
    assert f"modified: {EAGLE} was changed by someone else\n" in refused.stdout
    assert "unless you say --force" in refused.stdout
    before = snapshot(site_packages)
    planned = run("apply", *where, "--force", "--dry-run")
    assert planned.exit_code == 1
    assert f"{EAGLE}, which someone else changed, would be patched as it is" in planned.stdout
    assert "unless you say --force" not in planned.stdout
    assert snapshot(site_packages) == before
    assert any("revert brings it back" in note for note in notes("apply", *where, "--force"))
    reverted = run("revert", *where)
    assert reverted.exit_code == 0
    assert reverted.stdout.endswith("Every file is as it was before.\n")
    assert "unless you say --force" not in reverted.stdout
    assert "modified: " not in reverted.stdout
    assert "unless you say --force" in run("check", *where).stdout
    assert (site_packages / EAGLE).read_bytes() == edited
    assert snapshot(site_packages) == before
    tried(
        GROUP,
        "apply --force on a file that someone else edited",
        how="a line added before apply; with --dry-run, for real, then revert",
        result="says that it patches the edited file; revert brings back the edited bytes",
    )


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_what_force_would_replace_is_named_and_kept(
    site_packages: Path, command: str, tried: Tried
) -> None:
    where = ("--site-packages", site_packages)
    assert run("apply", *where).exit_code == 0
    text = (site_packages / SPECULATIVE).read_bytes()
    broken = text.replace(b'"deepseek_v3"', b'"deepseek_v4"')
    assert broken != text
    (site_packages / SPECULATIVE).unlink()
    (site_packages / SPECULATIVE).write_bytes(broken)
    refused = run(command, *where)
    assert refused.exit_code == 5
    before = snapshot(site_packages)
    planned = run(command, *where, "--force", "--dry-run")
    assert planned.exit_code == 1
    expected = f"the edited {SPECULATIVE} would be replaced, and a copy of it kept in"
    assert expected in planned.stdout
    assert "a copy of the edited" not in planned.stdout
    assert "unless you say --force" not in planned.stdout
    assert snapshot(site_packages) == before
    (note,) = (n for n in notes(command, *where, "--force") if "a copy of the edited" in n)
    (copy,) = (word.rstrip(";") for word in note.split() if word.startswith(".vllm-eagle3-patch"))
    assert (site_packages / copy).read_bytes() == broken
    tried(
        GROUP,
        f"{command} --force on a patched file that was edited since",
        how="a word changed after apply; with --dry-run, then for real",
        result="names the file that it replaces, keeps a copy of it and says where",
    )


@pytest.mark.parametrize(
    "broken",
    [
        "METADATA gone",
        "RECORD unreadable",
        "registry gone",
        "a patched file unreadable as Python",
        "no __init__.py",
        "half of it removed",
    ],
)
def test_revert_works_whatever_became_of_vllm(
    site_packages: Path, broken: str, tried: Tried
) -> None:
    before = snapshot(site_packages)
    where = ("--site-packages", site_packages)
    assert run("apply", *where).exit_code == 0
    removed = break_it(site_packages, broken)
    after = snapshot(site_packages)
    outcome = run("revert", *where, "--force")
    assert outcome.exit_code == 0, outcome.stderr
    found = snapshot(site_packages)
    kept = {name for name in found if name.startswith(".vllm-eagle3-patch")}
    assert bool(kept) == (broken == "a patched file unreadable as Python")
    # What was broken stays broken, and everything that was ours is as it was before us.
    assert {name: entry for name, entry in found.items() if name not in kept} == {
        name: after[name] if name in removed else entry
        for name, entry in before.items()
        if name in after
    }
    tried(
        GROUP,
        f"revert, with vLLM broken: {broken}",
        how="broken after apply, then one revert --force",
        result="every file of ours that is still there is the original again; what is broken stays",
    )


def break_it(site_packages: Path, how: str) -> set[str]:
    """Break an installation; returns the names of what is there but is not what it was."""
    (info,) = site_packages.glob("*.dist-info")
    match how:
        case "METADATA gone":
            (info / "METADATA").unlink()
        case "RECORD unreadable":
            (info / "RECORD").write_bytes(b'"\xff\x00\nvllm/__init__.py,sha256=\xe9,1')
            return {f"{info.name}/RECORD"}
        case "registry gone":
            (site_packages / "vllm/model_executor/models/registry.py").unlink()
        case "a patched file unreadable as Python":
            (site_packages / SPECULATIVE).write_bytes(b"\0(")
        case "no __init__.py":
            (site_packages / "vllm/__init__.py").unlink()
        case "half of it removed":
            shutil.rmtree(site_packages / "vllm/v1")
            shutil.rmtree(info)
            (site_packages / "vllm/__init__.py").unlink()
    return set()
