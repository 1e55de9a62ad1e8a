"""Processes of this machine, as Linux shows them below ``/proc``."""

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def running_with(root: Path) -> tuple[int, ...]:
    """The processes that have the vLLM of an installation loaded.

    They map a file of the package, or run the program ``vllm`` or ``python -m vllm...`` with an
    interpreter of the same environment. Processes that may not be looked into and those of other
    mount namespaces are passed over; without ``/proc`` there are none.
    """
    found = []
    places = {Path(os.path.abspath(root)), _real(root)}  # noqa: PTH100  links are kept
    for process in _processes():
        try:
            if _same_mounts(process) and (_maps(process, places) or _runs(process, places)):
                found.append(int(process.name))
        except OSError:
            continue  # It ended meanwhile, or belongs to someone else.
    return tuple(sorted(found))


def roots_in_use() -> dict[Path, Path | None]:
    """The folders of packages that processes use, each with an interpreter if one is known.

    They hold a ``vllm`` that a process has loaded or may run, or belong to the environment whose
    Python a process runs, whatever it does.
    """
    found: dict[Path, Path | None] = {}
    for process in _processes():
        try:
            if _same_mounts(process):
                python = _python(process)
                for root in (*_mapped_roots(process), *_roots_of_program(process, python)):
                    found[root] = found.get(root) or python or _python_of(root)
        except OSError:
            continue  # It ended meanwhile, or belongs to someone else.
    return found


def is_running(pid: int, started: str | None) -> bool:
    """Whether a process of this machine and PID namespace still runs.

    Numbers are used again: it counts if it was started when ``started_at`` said.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # It is there; that it is someone else's does not matter.
    fields = _status_fields(pid)
    if not fields:
        return True
    ended = fields[0] in {"Z", "X"}
    return not ended and started in {None, fields[19]}


def started_at(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None if not known."""
    fields = _status_fields(pid)
    return fields[19] if fields else None


def _status_fields(pid: int) -> list[str]:
    # The second field is the program's name in parentheses and may hold anything.
    try:
        text = (PROC / str(pid) / "stat").read_text("ascii", "replace")
    except OSError:
        return []  # There is no /proc, or it hides this process.
    return text.rpartition(")")[2].split()


def _processes() -> Iterator[Path]:
    if PROC.is_dir():
        own = str(os.getpid())
        for folder in PROC.iterdir():
            if folder.name.isdigit() and folder.name != own:
                yield folder


def _same_mounts(process: Path) -> bool:
    return (process / "ns/mnt").readlink() == (PROC / "self/ns/mnt").readlink()


def _maps(process: Path, places: set[Path]) -> bool:
    maps = (process / "maps").read_bytes()
    # The kernel writes a newline in a path as \012, and nothing else differently.
    packages = (os.fsencode(place / "vllm") + b"/" for place in places)
    return any(b" " + package.replace(b"\n", rb"\012") in maps for package in packages)


def _mapped_roots(process: Path) -> Iterator[Path]:
    for line in (process / "maps").read_bytes().splitlines():
        start, end = line.find(b"/"), line.find(b"/vllm/")
        if 0 <= start < end:
            root = Path(os.fsdecode(line[start:end].replace(rb"\012", b"\n")))
            if (root / "vllm/__init__.py").is_file():
                yield root


def _roots_of_program(process: Path, python: Path | None) -> Iterator[Path]:
    program = _program(_arguments(process))
    program_path = None if program is None else _interpreter(process, program)
    for path in dict.fromkeys((program_path, python)):
        if path is not None:
            yield from sorted(path.parent.parent.glob("lib*/python3*/*-packages"))


def _python(process: Path) -> Path | None:
    """The interpreter that a process was started by, if it is an environment's."""
    program = _arguments(process)[0]
    if not Path(program).name.startswith("python"):
        return None
    python = _interpreter(process, program)
    return python if python is not None and _is_environments(python) else None


def _python_of(root: Path) -> Path | None:
    """The interpreter of the environment that a folder of packages belongs to."""
    pythons = (prefix / "bin/python" for prefix in _environments(root))
    return next((python for python in pythons if _is_environments(python)), None)


def _is_environments(python: Path) -> bool:
    prefix = python.parent.parent
    is_one = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    return is_one and python.exists()


def _arguments(process: Path) -> list[str]:
    command = (process / "cmdline").read_bytes().removesuffix(b"\0").split(b"\0")
    return [os.fsdecode(argument) for argument in command]


def _runs(process: Path, places: set[Path]) -> bool:
    program = _program(_arguments(process))
    if program is None:
        return False
    interpreter = _interpreter(process, program)
    if interpreter is None:
        return False
    prefix = interpreter.parent.parent
    return any({prefix, _real(prefix)} & _environments(place) for place in places)


def _real(path: Path) -> Path:
    """A path without links; unlike ``Path.resolve`` also where links lead in a circle."""
    return Path(os.path.realpath(path))


def _program(arguments: list[str]) -> str | None:
    """What tells the environment if this runs vLLM: its script or its interpreter."""
    if Path(arguments[0]).name == "vllm":
        return arguments[0]
    if not Path(arguments[0]).name.startswith("python"):
        return None
    rest = iter(arguments[1:])
    for argument in rest:
        if argument == "-m":
            return arguments[0] if next(rest, "").partition(".")[0] == "vllm" else None
        if argument in {"-X", "-W"}:
            next(rest, None)
        elif not argument.startswith("-"):
            return argument if Path(argument).name == "vllm" else None
    return None


def _interpreter(process: Path, program: str) -> Path | None:
    import shutil  # It loads much, and `check` needs none of it.

    if os.path.isabs(program):  # noqa: PTH117  no Path is needed
        return Path(program)
    if "/" in program:
        return Path(os.path.normpath((process / "cwd").readlink() / program))
    variables = (process / "environ").read_bytes().split(b"\0")
    path = next((value[5:] for value in variables if value.startswith(b"PATH=")), b"")
    found = shutil.which(program, path=os.fsdecode(path))
    return None if found is None else Path(found)


def _environments(root: Path) -> set[Path]:
    """The prefixes that an installation folder belongs to."""
    for folder in (root, *root.parents):
        if folder.name in {"lib", "lib64"}:
            # Debian's interpreter in /usr looks into /usr/local/lib/python3*/dist-packages too.
            local = folder.parent.name == "local" and root.name == "dist-packages"
            return {folder.parent, folder.parent.parent} if local else {folder.parent}
    return set()
