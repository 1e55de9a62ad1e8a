"""Which running processes have an installation loaded."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_eagle3_patch.ground import processes
from vllm_eagle3_patch.ground.processes import is_running, running_with, started_at

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of our own, with this process in it."""
    folder = tmp_path / "proc"
    folder.mkdir()
    monkeypatch.setattr(processes, "PROC", folder)
    process(folder, os.getpid(), ["vllm"])
    (folder / "self").symlink_to(str(os.getpid()))
    (folder / "uptime").touch()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "venv/lib/python3.12/site-packages"
    (root / "vllm").mkdir(parents=True)
    return root


def process(
    proc: Path,
    pid: int,
    command: list[str],
    *,
    maps: bytes = b"",
    environment: bytes = b"",
    namespace: str = "mnt:[1]",
) -> None:
    folder = proc / str(pid)
    (folder / "ns").mkdir(parents=True)
    (folder / "ns/mnt").symlink_to(namespace)
    (folder / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in command))
    (folder / "maps").write_bytes(maps)
    (folder / "environ").write_bytes(environment)


def mapping(path: Path) -> bytes:
    shown = os.fsencode(path).replace(b"\n", rb"\012")
    return b"7f00-7f01 r-xp 00000000 08:01 1234                       " + shown + b"\n"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["{venv}/bin/python", "{venv}/bin/vllm", "serve", "m"], True),
        (["{venv}/bin/vllm", "serve", "m"], True),
        (["{venv}/bin/python3.12", "-m", "vllm.entrypoints.openai.api_server"], True),
        (["{venv}/bin/python", "-X", "dev", "-u", "-m", "vllm", "serve"], True),
        (["{venv}/bin/python", "-m", "vllm_eagle3_patch"], False),
        (["{venv}/bin/python", "-m"], False),
        (["{venv}/bin/python", "server.py", "-m", "vllm"], False),
        (["{venv}/bin/python"], False),
        (["{venv}/bin/python", "-X", "dev"], False),
        (["/other/bin/python", "/other/bin/vllm", "serve"], False),
        (["/other/bin/python", "{venv}/bin/vllm", "serve"], True),
        (["/other/bin/python", "-m", "vllm"], False),
        (["less", "{venv}/bin/vllm"], False),
        ([], False),
    ],
)
def test_programs_that_run_vllm_of_this_environment(
    proc: Path, root: Path, command: list[str], found: bool
) -> None:
    venv = str(root.parents[2])
    process(proc, 2, [word.format(venv=venv) for word in command])
    assert running_with(root) == ((2,) if found else ())


def test_whoever_maps_a_file_of_the_package(proc: Path, root: Path) -> None:
    process(proc, 3, ["VLLM::EngineCore"], maps=mapping(root / "vllm/_C.abi3.so"))
    process(proc, 2, ["VLLM::Worker"], maps=mapping(root / "vllm/deep/_moe.so (deleted)"))
    process(proc, 4, ["other"], maps=mapping(root / "vllm_flash_attn/_C.abi3.so"))
    process(proc, 5, ["other"], maps=mapping(Path("/other") / str(root)[1:] / "vllm/_C.abi3.so"))
    assert running_with(root) == (2, 3)


def test_an_installation_reached_through_a_link(proc: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root.parents[2])
    through = tmp_path / "link/lib/python3.12/site-packages"
    process(proc, 2, ["x"], maps=mapping(root / "vllm/_C.abi3.so"))
    process(proc, 3, [f"{tmp_path}/link/bin/vllm"])
    process(proc, 4, [f"{root.parents[2]}/bin/vllm"])
    assert running_with(through) == (2, 3, 4)
    assert running_with(root) == (2, 3, 4)


def test_a_path_with_a_newline(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "new\nline"
    process(proc, 2, ["x"], maps=mapping(root / "vllm/_C.abi3.so"))
    assert running_with(root) == (2,)


def test_a_program_named_without_its_folder_is_looked_up_as_it_was(
    proc: Path, root: Path, tmp_path: Path
) -> None:
    programs = root.parents[2] / "bin"
    programs.mkdir()
    for name in ("python", "vllm"):
        (programs / name).touch(mode=0o755)
    path = b"LANG=C\0PATH=/nowhere:" + os.fsencode(programs) + b"\0"
    process(proc, 2, ["python", "-m", "vllm"], environment=path)
    process(proc, 3, ["vllm", "serve"], environment=path)
    process(proc, 4, ["vllm", "serve"], environment=b"PATH=/nowhere\0")
    process(proc, 5, ["bin/python", "-m", "vllm"])
    (proc / "5/cwd").symlink_to(root.parents[2])
    assert running_with(root) == (2, 3, 5)


def test_debians_interpreter_looks_into_local_packages(proc: Path) -> None:
    root = Path("/usr/local/lib/python3.12/dist-packages")
    process(proc, 2, ["/usr/bin/python3", "-m", "vllm"])
    process(proc, 3, ["/usr/local/bin/vllm"])
    process(proc, 4, ["/opt/bin/vllm"])
    assert running_with(root) == (2, 3)


def test_a_checkout_belongs_to_no_environment(proc: Path) -> None:
    process(proc, 2, ["/usr/bin/python3", "-m", "vllm"])
    assert running_with(Path("/home/someone/vllm-checkout")) == ()


def test_what_may_not_be_looked_into_is_passed_over(proc: Path, root: Path) -> None:
    command = [f"{root.parents[2]}/bin/vllm"]
    process(proc, 2, command)
    process(proc, 3, command, namespace="mnt:[2]")
    process(proc, 4, command)
    (proc / "4/maps").unlink()
    process(proc, 5, command)
    (proc / "5/ns/mnt").unlink()
    process(proc, 6, ["bin/vllm"])
    assert running_with(root) == (2,)


def test_without_proc_there_are_none(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path / "none")
    assert running_with(root) == ()
    assert started_at(os.getpid()) is None
    assert is_running(os.getpid(), None)
    assert is_running(os.getpid(), "whenever")


@linux
def test_a_real_process_that_maps_a_file(root: Path) -> None:
    library = root / "vllm/_C.abi3.so"
    library.write_bytes(bytes(mmap.PAGESIZE))
    program = (
        "import mmap, sys\n"
        f"file = open({str(library)!r}, 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        assert running_with(root) == (child.pid,)
        child.communicate(b"")
    assert running_with(root) == ()


@linux
def test_a_process_runs_until_it_ends_even_if_nobody_waits_for_it() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    started = started_at(child)
    assert started is not None
    assert is_running(child, started)
    assert is_running(child, None)
    assert not is_running(child, started + "0")
    os.close(writer)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not is_running(child, started)
    os.waitpid(child, 0)
    assert not is_running(child, started)
    assert started_at(child) is None
    os.close(reader)


def test_a_process_of_someone_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert is_running(os.getpid(), started_at(os.getpid()))


def test_a_number_that_no_process_can_have() -> None:
    assert not is_running(2**40, None)
