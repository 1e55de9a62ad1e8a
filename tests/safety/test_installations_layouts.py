"""Where an installation lies and who looks at it: conda, odd names, the tool's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from uv_environment import Uv, make_wheel, vllm_wheel
from whole_tree import STATE, check_apply_check_diff, revert_and_check, whole_tree

import fake_environments as fake
from command_line import run
from conftest import small_copy
from safety_table import Tried

GROUP = "Installations as they are"
ROOT = Path(__file__).parents[2]
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"


def test_hard_links_into_the_cache_of_conda(tmp_path: Path, tried: Tried) -> None:
    package = tmp_path / "pkgs/vllm-0.17.1-py_0"
    cached = small_copy("0.17.1", package / "site-packages")
    (package / "info").mkdir()
    (package / "info/index.json").write_text('{"name": "vllm", "version": "0.17.1"}')
    prefix = tmp_path / "envs/serving"
    fake.make_venv(prefix)
    site = fake.site_packages_of(prefix)
    files = [str(path.relative_to(cached)) for path in cached.rglob("*") if path.is_file()]
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).hardlink_to(cached / file)
    installed = {"name": "vllm", "files": files, "link": {"source": str(package), "type": 1}}
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta/vllm-0.17.1-py_0.json").write_text(json.dumps(installed))
    before = {folder: whole_tree(folder) for folder in (package, prefix)}
    active = {"CONDA_PREFIX": str(prefix)}
    checked = run("check", "--json", env=active)
    assert checked.document["vllm"]["chosen_by"] == "CONDA_PREFIX"
    changed = check_apply_check_diff(env=active)
    for path in changed:
        kept = cached / path
        assert kept.read_bytes() == before[package][f"site-packages/{path}"].content
        assert kept.stat().st_ino == before[package][f"site-packages/{path}"].inode
        assert not kept.samefile(site / path)
    revert_and_check(env=active)
    assert {folder: whole_tree(folder) for folder in before} == before
    tried(
        GROUP,
        "hard links into conda's package cache",
        how="a prefix with `conda-meta` and a `pkgs` folder as conda lays them out (conda itself "
        "was not run); check, apply, check, diff, revert by `CONDA_PREFIX`",
        result="the cache untouched to the inode; after revert all as before",
    )


@pytest.mark.parametrize(
    "name", [b"with space", b"two\nlines", b"not UTF-8 \xff\xe9", b"-rf $(x) 'q\" \\"]
)
def test_a_path_with_any_bytes(name: bytes, tmp_path: Path, tried: Tried) -> None:
    folder = tmp_path / os.fsdecode(name)
    site = small_copy("0.17.1", folder / "site-packages")
    before = whole_tree(tmp_path)
    here = ("--site-packages", site)
    check_apply_check_diff(*here)
    told = run("check", *here).stdout
    assert all(line.isprintable() for line in told.splitlines())
    revert_and_check(*here)
    assert whole_tree(tmp_path) == before
    # The command that is told next leads here, pasted into a shell.
    told = run("check", *here).stdout
    (line,) = (line for line in told.splitlines() if line.startswith("  vllm-eagle3-patch apply"))
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True
    ).stdout.split(b"\0")
    assert shown[2:4] == [b"--site-packages", os.fsencode(site)]
    tried(
        GROUP,
        "a path with spaces, quotes, newlines or bytes that are not UTF-8",
        how="check, apply, check, diff, revert; the command told next is pasted into a shell",
        result="all as for any path; what is told stays on one line each",
    )


def test_dist_packages_of_an_image_that_is_not_running(tmp_path: Path, tried: Tried) -> None:
    image = tmp_path / "image"
    dist = small_copy("0.17.1", image / "usr/local/lib/python3.12/dist-packages")
    before = whole_tree(image)
    hint = run("check", "--site-packages", image / "usr/local").stderr.splitlines()[1]
    assert hint.endswith(f"--site-packages {dist}")
    check_apply_check_diff("--site-packages", dist)
    assert (dist / STATE).is_dir()
    revert_and_check("--site-packages", dist)
    assert whole_tree(image) == before
    tried(
        GROUP,
        "dist-packages in the file tree of an image",
        how="`--site-packages` on the unpacked image, no interpreter of it is run; check, apply, "
        "check, diff, revert",
        result="after revert all as before; a folder above gets the right one as a hint",
    )


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tool, without the installation of what it needs."""
    package = ROOT / "vllm_eagle3_patch"
    names = [*package.rglob("*"), *(package / "patches").rglob("*")]
    files = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in names
        if path.suffix in (".py", ".toml") and path.is_file()
    }
    info = "vllm_eagle3_patch-9.9.dist-info"
    files[f"{info}/entry_points.txt"] = (
        b"[console_scripts]\nvllm-eagle3-patch = vllm_eagle3_patch.__main__:main\n"
    )
    return make_wheel(tmp_path_factory.mktemp("tool"), "vllm_eagle3_patch", "9.9", files)


@pytest.mark.parametrize("same", [True, False])
def test_the_tool_in_the_same_environment_and_in_another(
    same: bool, tool: Path, tmp_path: Path, tried: Tried
) -> None:
    uv = Uv(tmp_path / "cache")
    serving, tools = tmp_path / "serving", tmp_path / ("serving" if same else "tools")
    site = uv.venv(serving)
    if not same:
        uv.venv(tools)
    uv.install(tools, "--compile-bytecode", tool)
    uv.install(serving, vllm_wheel("0.17.1", tmp_path))
    # What the tool needs is taken from the environment of the tests: nothing is fetched.
    needed = fake.site_packages_of(tools) / "needed.pth"
    needed.write_text(f"{sysconfig.get_path('purelib')}\n")
    before = whole_tree(serving)
    where = [] if same else ["--python", str(serving)]

    def tool_run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": "/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [str(tools / "bin/vllm-eagle3-patch"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    only = ("--only", "eagle3-allowlist")
    checked = tool_run("check", *where, *only, "--json")
    assert checked.returncode == 1, checked.stderr
    found = json.loads(checked.stdout)["vllm"]
    assert found["location"] == str(site / "vllm")
    assert found["chosen_by"] == ("this interpreter" if same else "--python")
    for command, code in (("apply", 0), ("check", 0), ("diff", 1)):
        assert tool_run(command, *where, *only).returncode == code
    assert tool_run("revert", *where).returncode == 0
    assert whole_tree(serving) == before
    tried(
        GROUP,
        "the tool in vLLM's own environment" if same else "the tool in an environment of its own",
        how="both installed by the real uv, the installed program run; check, apply, check, diff, "
        "revert",
        result="vLLM is found; after revert all as before",
    )


def test_an_environment_in_another(tmp_path: Path) -> None:
    """A state folder of the outer one is not taken for that of the inner one."""
    outer = small_copy("0.17.1", tmp_path / "site-packages")
    inner = small_copy("0.17.1", outer / "vllm/third_party/site-packages")
    before = whole_tree(inner)
    check_apply_check_diff("--site-packages", outer)
    assert whole_tree(inner) == before
    assert run("check", "--site-packages", inner, "--json").exit_code == 1
    assert not run("check", "--site-packages", inner, "--json").codes
