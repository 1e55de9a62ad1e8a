"""What a user is told when files are not as they should be, before and after ``--force``."""

from __future__ import annotations

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
    assert run("revert", *where).exit_code == 0
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
