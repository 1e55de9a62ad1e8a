"""Layers of images, read-only file systems, and the system's dist-packages, really mounted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from private_mounts import in_private, mount
from uv_environment import Uv
from whole_tree import STATE, whole_tree, without_inodes

from command_line import run
from conftest import small_copy
from safety_table import Tried

GROUP = "Installations as they are"
SYSTEM_PYTHON = Path("/usr/bin/python3")


def overlay(folder: Path, lower: Path, name: str) -> Path:
    """Mount a writable layer over one that is only read."""
    upper, work, merged = (folder / f"{name}-{part}" for part in ("upper", "work", "merged"))
    for made in (upper, work, merged):
        made.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mount("-t", "overlay", "overlay", "-o", options, merged)
    return merged


def exit_codes(root: Path, *commands: str) -> list[int]:
    return [run(command, "--site-packages", root).exit_code for command in commands]


def patched_in_an_upper_layer(folder: Path) -> None:
    lower = small_copy("0.17.1", folder / "lower")
    # As an image layer that was written with hard links has it.
    os.link(lower / "vllm/config/speculative.py", lower / "second-name")
    merged = overlay(folder, lower, "first")
    image, before = whole_tree(lower), whole_tree(merged)
    cycle = ("check", "apply", "check", "diff", "revert", "check")
    assert exit_codes(merged, *cycle) == [1, 0, 0, 1, 0, 1]
    assert without_inodes(whole_tree(merged)) == without_inodes(before)
    assert whole_tree(lower) == image


def patched_in_the_image(folder: Path) -> None:
    lower = small_copy("0.17.1", folder / "lower")
    before = without_inodes(whole_tree(lower))
    assert exit_codes(lower, "apply") == [0]
    image = whole_tree(lower)
    merged = overlay(folder, lower, "first")
    assert exit_codes(merged, "check", "diff", "revert", "check") == [0, 1, 0, 1]
    assert without_inodes(whole_tree(merged)) == before
    assert whole_tree(lower) == image


def read_only(folder: Path) -> None:
    fresh, patched = (small_copy("0.17.1", folder / name) for name in ("fresh", "patched"))
    assert exit_codes(patched, "apply") == [0]
    trees = {root: whole_tree(root) for root in (fresh, patched)}
    (folder / "empty").mkdir()
    (folder / "layers").mkdir()
    mount("-t", "overlay", "overlay", "-o", f"lowerdir={folder}/empty:{fresh}", folder / "layers")
    for root in (fresh, patched):
        mount("--bind", root, root)
        mount("-o", "remount,bind,ro", root)
    assert exit_codes(fresh, "check", "diff") == [1, 1]
    assert exit_codes(patched, "check", "diff", "apply") == [0, 1, 0]
    for root, command in ((fresh, "apply"), (patched, "revert"), (folder / "layers", "apply")):
        ended = run(command, "--site-packages", root, "--json")
        assert ended.exit_code == 7
        assert ended.codes == {"read-only"}
        assert "remount the file system for writing" in ended.stderr
    assert {root: whole_tree(root) for root in trees} == trees


def each_in_a_folder(folder: Path) -> None:
    """One process for all: most of the time goes into its start."""
    for number, steps in enumerate((patched_in_an_upper_layer, patched_in_the_image, read_only)):
        (folder / str(number)).mkdir()
        steps(folder / str(number))


def test_layers_and_read_only_mounts(tmp_path: Path, tried: Tried) -> None:
    in_private(each_in_a_folder, tmp_path)
    tried(
        GROUP,
        "vLLM in a read-only layer, patched in the layer above",
        how="a real overlay mount, one file with two names; check, apply, check, diff, revert",
        result="the layer below untouched to the inode; after revert all as before (files that "
        "were changed are the layer's own copies)",
    )
    tried(
        GROUP,
        "vLLM patched when the image was built, reverted in a container",
        how="a real overlay mount over a patched layer; check, diff, revert",
        result="all as before apply; the layer below still patched, untouched",
    )
    tried(
        GROUP,
        "a file system mounted read-only",
        how="real read-only mounts of a fresh and a patched vLLM, and of layers without a "
        "writable one",
        result="check and diff work; apply and revert exit 7 and say what to do; an apply with "
        "nothing to do exits 0",
        count=3,
    )


def dist_packages() -> Path:
    """Where the system's own Python has what an administrator installs."""
    script = "import site; print(site.getsitepackages()[0])"
    command = [SYSTEM_PYTHON, "-I", "-c", script]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"there is no system Python: {error}")
    if Path(said).name != "dist-packages" or not Path(said).is_dir():
        pytest.skip(f"the system's Python has no dist-packages: {said}")
    return Path(said)


def of_the_system(folder: Path) -> None:
    system = dist_packages()
    mount("--bind", folder / "dist-packages", system)
    before = whole_tree(folder)
    inherits, own = folder / "inherits", folder / "own"
    for python, root in (
        (SYSTEM_PYTHON, system),
        (inherits, system),
        (own, next(own.glob("lib/python3*/site-packages"))),
    ):
        where = ("--python", python)
        checked = run("check", *where, "--json")
        assert checked.exit_code == 1
        assert checked.document["vllm"]["location"] == str(root / "vllm")
        shadowed = [p for p in checked.document["problems"] if p["code"] == "shadowed"]
        assert len(shadowed) == (python == own)
        if shadowed:
            assert str(system / "vllm") in shadowed[0]["message"]
        applied = run("apply", *where, "--json")
        assert applied.exit_code == 0
        assert (root / STATE).is_dir()
        patched = whole_tree(folder)
        written = {name for name in patched if patched[name] != before.get(name)}
        inside = "dist-packages/" if root == system else str(root.relative_to(folder)) + "/"
        assert {name for name in written if not name.startswith(inside)} == set()
        assert run("check", *where).exit_code == 0
        assert run("diff", *where).exit_code == 1
        assert run("revert", *where).exit_code == 0
        assert whole_tree(folder) == before


def test_dist_packages_and_environments_that_see_them(tmp_path: Path, tried: Tried) -> None:
    dist_packages()
    small_copy("0.17.1", tmp_path / "dist-packages")
    uv = Uv(tmp_path / "cache")
    for name in ("inherits", "own"):
        options = ("--system-site-packages",)
        uv.venv(tmp_path / name, *options, python=SYSTEM_PYTHON)
    (site,) = (tmp_path / "own").glob("lib/python3*/site-packages")
    small_copy("0.17.1", tmp_path / "copied")
    for entry in (tmp_path / "copied").iterdir():
        entry.rename(site / entry.name)
    in_private(of_the_system, tmp_path)
    for situation, result in (
        (
            "vLLM in the system's dist-packages",
            "found with the system's Python; after revert all as before",
        ),
        (
            "an environment made with `--system-site-packages` where vLLM is the system's",
            "check says that it is the system's; nothing is written in the environment",
        ),
        (
            "two vLLM on the path, the environment's and the system's",
            "the one that Python imports is patched; the other is told as `shadowed` and stays as "
            "it is",
        ),
    ):
        tried(
            GROUP,
            situation,
            how="mounted for the real /usr/bin/python3; check, apply, check, diff, revert with "
            "`--python`",
            result=result,
        )
