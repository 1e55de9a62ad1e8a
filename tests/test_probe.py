"""The probe's own functions, in this process; test_find.py runs it in foreign interpreters."""

import ast
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from fake_environments import make_package
from vllm_eagle3_patch.installation import probe


@pytest.fixture
def search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A search path of two empty folders, and no import hooks."""
    path = [str(tmp_path / "first"), str(tmp_path / "second")]
    for entry in path:
        Path(entry).mkdir()
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    return path


def test_the_source_can_be_read_by_python_3_6_in_any_locale():
    source = Path(probe.__file__).read_text(encoding="ascii")
    ast.parse(source, feature_version=(3, 6))


def test_nothing_to_find(search_path: list[str]):
    found = probe.look(search_path)
    assert found["package"] is None
    assert found["remnants"] == found["candidates"] == []
    assert found["error"] is None
    assert found["path"] == search_path
    assert found["version"] == list(sys.version_info[:3])


def test_the_first_on_the_path_is_found_without_importing_it(search_path: list[str]):
    for entry in search_path:
        make_package(Path(entry))
    found = probe.look(search_path)
    assert found["package"] == f"{search_path[0]}/vllm"
    assert found["candidates"] == [f"{entry}/vllm" for entry in search_path]
    assert "vllm" not in sys.modules


def test_a_folder_without_init_is_a_remnant(search_path: list[str]):
    Path(search_path[1], "vllm").mkdir()
    found = probe.look(search_path)
    assert found["package"] is None
    assert found["remnants"] == [f"{search_path[1]}/vllm"]


def test_a_single_module_of_that_name_is_not_vllm(search_path: list[str]):
    Path(search_path[0], "vllm.py").write_text("")
    assert (
        probe.look(search_path)["error"] == f"{search_path[0]}/vllm.py is a module, not the package"
    )


def test_a_finder_that_fails_is_reported(search_path: list[str], monkeypatch: pytest.MonkeyPatch):
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
            raise OSError("no such mount")

    monkeypatch.setattr(sys, "meta_path", [Broken()])
    assert probe.look(search_path)["error"] == "OSError: no such mount"


def test_the_package_of_an_editable_hook_is_a_candidate(
    search_path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkout = make_package(tmp_path / "checkout")
    hook = ModuleType("__editable___vllm_finder")
    hook.MAPPING = {"vllm": str(checkout / "vllm")}  # type: ignore[attr-defined]
    finder = type("_EditableFinder", (), {"__module__": hook.__name__})
    monkeypatch.setitem(sys.modules, hook.__name__, hook)
    monkeypatch.setattr(sys, "meta_path", [PathFinder, finder])
    make_package(Path(search_path[0]))
    assert probe.package_folders(search_path) == [f"{search_path[0]}/vllm", f"{checkout}/vllm"]


def test_the_working_directory_and_what_is_no_text_leave_the_path():
    mixed = ["", "/a", Path("/b"), "/c"]
    assert probe.without_working_directory(mixed) == ["/a", "/c"]  # type: ignore[arg-type]


def test_any_bytes_of_a_path_survive():
    path = os.fsdecode(b"/caf\xe9 \xc3\xa9\n")
    assert json.loads(json.dumps(probe.as_text(path))).encode("latin-1") == os.fsencode(path)


def test_the_answer_stands_between_marks(search_path: list[str]):
    answer = probe.answer("nonce").decode("ascii")
    assert answer.startswith("\nbegin-nonce{")
    assert answer.endswith("}end-nonce\n")
    assert json.loads(answer[len("\nbegin-nonce") : -len("end-nonce\n")])["path"] == search_path


def test_all_is_written_when_the_system_takes_it_in_pieces(monkeypatch: pytest.MonkeyPatch):
    written = bytearray()

    def take_three(descriptor: int, data: bytes) -> int:
        assert descriptor == 1
        written.extend(data[:3])
        return len(data[:3])

    monkeypatch.setattr(os, "write", take_three)
    probe.write(b"0123456789")
    monkeypatch.undo()
    assert written == b"0123456789"
