"""The manifest and the journal, damaged or forged in any way: an error of ours, and no change.

``VLLM_EAGLE3_PATCH_FUZZ=long`` looks for minutes, at random; by default the same few hundred
documents are tried each time.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_line import run
from fault_injection import killed_at, points_of
from safety_table import Tried
from small_installation import PLAIN, apply, contents, make_installation, revert, tree
from vllm_eagle3_patch.ground.errors import PatchError, StateCorruptError
from vllm_eagle3_patch.transaction.recovery import recover
from vllm_eagle3_patch.transaction.state.journal import unfinished
from vllm_eagle3_patch.transaction.state.manifest import read_manifest

LONG = os.environ.get("VLLM_EAGLE3_PATCH_FUZZ") == "long"
STATE = ".vllm-eagle3-patch"
BOUNDED = settings(
    derandomize=not LONG,
    max_examples=20_000 if LONG else 60,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63, 10**400, 1.5, float("nan")])
NAMES = (
    "", "vllm", "vllm/plain.py", "../x", "/etc/passwd", "vllm/../../x", "a\0b", "vllm/\ud800",
    "vllm/" + "n" * 300, "\x1b[31m", "vllm/config/../plain.py", "vllm/\udcff", "日本", "0" * 64,
    "apply", "revert", "vllm/plain.py/x", "vllm/config", "0123abcd",
)  # fmt: skip
TEXTS = st.sampled_from(NAMES) | st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read here is not about what a disk holds after a power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """An installation with a manifest, and the journal of an apply that was killed half way."""
    root = make_installation(tmp_path / "real")
    shutil.copytree(tmp_path / "real", tmp_path / "counted", symlinks=True)
    points = points_of(partial(apply, tmp_path / "counted/site-packages"))
    last = max(n for n, (_, _, path) in enumerate(points) if path.name == "manifest.json")
    assert killed_at(last, partial(apply, root))
    assert unfinished(root) is not None
    assert (root / STATE / "manifest.json").exists()
    return root


def places_in(document: Any) -> list[tuple[Any, Any]]:
    """Every field of a document, as what holds it and its key."""
    keys = list(document) if isinstance(document, dict) else range(len(document))
    found = [(document, key) for key in keys]
    for key in keys:
        if isinstance(document[key], (dict, list)):
            found += places_in(document[key])
    return found


@st.composite
def forged(draw: st.DrawFn, data: bytes) -> bytes:
    """A real document with fields replaced, removed or doubled, or anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return json.dumps(draw(JSON)).encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        flipped = data[at] ^ (1 << draw(st.integers(0, 7)))
        return data[:at] + bytes([flipped]) + data[at + 1 :]
    document = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(places_in(document)))
        if (isinstance(holder, dict) and key not in holder) or (
            isinstance(holder, list) and key >= len(holder)
        ):
            continue
        kind = draw(st.integers(0, 3))
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = draw(JSON)
        if not places_in(document):
            break
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", ["manifest.json", "journal.json"])
def test_readers_say_corrupt_or_read_and_never_write(
    interrupted: Path, name: str, tried: Tried
) -> None:
    file = interrupted / STATE / name
    real = file.read_bytes()
    results: list[str] = []

    @BOUNDED
    @given(data=forged(real))
    def fuzz(data: bytes) -> None:
        file.write_bytes(data)
        for read in (read_manifest, unfinished):
            try:
                read(interrupted)
                results.append("read")
            except StateCorruptError as error:
                assert error.exit_code == 5
                assert "\n" not in error.message + error.hint
                results.append("corrupt")

    before = tree(interrupted)
    fuzz()
    file.write_bytes(real)
    after = tree(interrupted)
    assert {path: entry[3] for path, entry in after.items()} == {
        path: entry[3] for path, entry in before.items()
    }
    assert set(results) == {"read", "corrupt"}
    tried(
        "Fuzzing",
        f"{name} with fields forged, removed or doubled, bits flipped, or anything at all",
        how="read as every command reads it",
        count=len(results),
        result="state-corrupt (5), or a document that holds what it may; nothing written",
    )


@pytest.mark.parametrize("name", ["manifest.json", "journal.json", "concluded.json"])
def test_what_is_done_about_a_forged_document_stays_in_the_installation(
    interrupted: Path, tmp_path: Path, name: str, tried: Tried
) -> None:
    state = interrupted / STATE
    if name == "concluded.json":
        (state / "journal.json").rename(state / name)
    real = (state / name).read_bytes()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/plain.py").write_text("outside\n")
    before = tree(tmp_path / "outside")
    cache = tree(tmp_path / "real/cache")
    shutil.move(tmp_path / "real", tmp_path / "kept")
    known = set(contents(tmp_path / "kept/site-packages").values())
    known |= {p.read_bytes() for p in (tmp_path / "kept/cache").iterdir()}
    count = 0

    @BOUNDED
    @given(data=forged(real))
    def fuzz(data: bytes) -> None:
        nonlocal count
        shutil.rmtree(tmp_path / "real", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "real", symlinks=True)
        (state / name).write_bytes(data)
        for command in (recover, revert, revert):
            try:
                command(interrupted)
            except PatchError as error:
                assert error.exit_code in {5, 7, 8}, error
                assert "\n" not in error.message + error.hint
        assert tree(tmp_path / "outside") == before
        count += 1

    fuzz()
    assert {p.name: p.read_bytes() for p in (tmp_path / "real/cache").iterdir()} == {
        path: entry[3] for path, entry in cache.items()
    }
    tried(
        "Fuzzing",
        f"recovery and revert with a forged {name}",
        how="fields forged, removed or doubled, bits flipped, or anything at all",
        count=count,
        result="an error of the contract, or done; nothing outside of the installation changed",
    )


@pytest.mark.parametrize("name", ["manifest.json", "journal.json", "concluded.json"])
def test_cut_off_anywhere_it_is_corrupt(interrupted: Path, name: str, tried: Tried) -> None:
    state = interrupted / STATE
    if name == "concluded.json":
        (state / "journal.json").rename(state / name)
    data = (state / name).read_bytes()
    read = read_manifest if name == "manifest.json" else unfinished
    for length in range(len(data) - 1):
        (state / name).write_bytes(data[:length])
        with pytest.raises(StateCorruptError, match=name):
            read(interrupted)
    before = tree(interrupted)
    with pytest.raises(StateCorruptError):
        recover(interrupted) if name != "manifest.json" else read_manifest(interrupted)
    # The lock of the run that died is all that was tidied up.
    after = tree(interrupted)
    assert after == {path: before[path] for path in before if ".lock" not in path} | after
    assert before.keys() - after.keys() <= {path for path in before if ".lock" in path}
    tried(
        "Hostile or bad input",
        f"{name} cut off",
        how="after each of its bytes",
        count=len(data) - 1,
        result="state-corrupt (5), nothing written",
    )


def test_check_answers_in_json_whatever_the_manifest_holds(
    site_packages: Path, tried: Tried
) -> None:
    assert run("apply", "--site-packages", site_packages).exit_code == 0
    file = site_packages / STATE / "manifest.json"
    real = file.read_bytes()
    codes: list[int] = []

    @settings(BOUNDED, max_examples=2000 if LONG else 10)
    @given(data=forged(real))
    def fuzz(data: bytes) -> None:
        file.write_bytes(data)
        ended = run("check", "--json", "--site-packages", site_packages)
        assert ended.document["exit_code"] == ended.exit_code
        codes.append(ended.exit_code)

    fuzz()
    assert set(codes) <= {0, 1, 4, 5}
    tried(
        "Fuzzing",
        "check --json with a forged manifest",
        how="fields forged, removed or doubled, bits flipped, or anything at all",
        count=len(codes),
        result="one JSON document and an exit code of the contract",
    )


@pytest.mark.parametrize("changed_ns", [-1, -(10**18), 10**19])
def test_a_file_of_any_age_comes_back(tmp_path: Path, changed_ns: int) -> None:
    root = make_installation(tmp_path)
    os.utime(root / PLAIN, ns=(changed_ns, changed_ns))
    before = tree(root)
    apply(root)
    assert read_manifest(root) is not None
    (root / STATE / "originals/1" / PLAIN).unlink()
    revert(root)
    assert tree(root)[PLAIN][2:] == before[PLAIN][2:]
