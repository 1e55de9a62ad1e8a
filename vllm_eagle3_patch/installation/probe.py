"""What would ``import vllm`` give here? Run by the interpreter that is asked, see interpreter.py.

Standard library only, and no syntax newer than Python 3.6, so that an interpreter that is too
old for vLLM can still say which one it is. vLLM itself is not imported.
"""

# pathlib would take longer to import than the rest of this.
# ruff: noqa: PTH113, PTH118, PTH120

import importlib.util
import json
import os
import sys

PACKAGE = "vllm"


def without_working_directory(path: "list[str]") -> "list[str]":
    """``python -c`` puts the working directory first, where a server's console script does not."""
    return [entry for entry in path if isinstance(entry, str) and entry]


def package_folders(path: "list[str]") -> "list[str]":
    """Every folder that could be imported as the package, in the order of the import system."""
    folders = [os.path.join(entry, PACKAGE) for entry in path]
    for finder in sys.meta_path:
        # The import hook of an editable installation, written by setuptools.
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(module, "MAPPING", None)
        if isinstance(mapping, dict) and PACKAGE in mapping:
            folders.append(mapping[PACKAGE])
    return [folder for folder in folders if os.path.isfile(os.path.join(folder, "__init__.py"))]


def look(path: "list[str]") -> "dict[str, object]":
    """Find the package as the import system does, without importing it.

    Returns:
        ``package``, the folder that would be imported; ``remnants``, folders of its name that
        hold no ``__init__.py`` and make Python import an empty package; ``candidates``, all that
        could be imported; ``error``, what is in the way; ``path``; ``version``, of Python.
    """
    package = None
    remnants = []  # type: list[str]
    error = None
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except Exception as failure:
        spec = None
        error = f"{type(failure).__name__}: {failure}"
    if spec is not None:
        if spec.has_location and spec.origin and spec.submodule_search_locations is not None:
            package = os.path.dirname(spec.origin)
        elif spec.submodule_search_locations is not None:
            remnants = list(spec.submodule_search_locations)
        else:
            error = f"{spec.origin} is a module, not the package"
    return {
        "version": list(sys.version_info[:3]),
        "path": [as_text(entry) for entry in path],
        "package": None if package is None else as_text(package),
        "remnants": [as_text(folder) for folder in remnants],
        "candidates": [as_text(folder) for folder in package_folders(path)],
        "error": error,
    }


def as_text(path: str) -> str:
    """A path's bytes, one character each, as two interpreters may differ in locale."""
    return os.fsencode(path).decode("latin-1")


def answer(nonce: str) -> bytes:
    """The answer as JSON in ASCII, between marks that no other output can contain."""
    sys.path[:] = without_working_directory(sys.path)
    document = json.dumps(look(sys.path))
    return f"\nbegin-{nonce}{document}end-{nonce}\n".encode("ascii")


def write(data: bytes) -> None:
    """Write to the standard output itself: a sitecustomize may have replaced ``sys.stdout``."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    write(answer(sys.argv[1]))
    os._exit(0)  # whatever was registered to run at exit is none of our business
