"""Every release of vLLM in the matrix, for real: fetched, checked, patched, reverted."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import Ended, run, snapshot
from conftest import small_copy
from semantics import ALL_RULES, Subject, check_all
from tools.fetch_release import copy_site_packages, fetch
from vllm_eagle3_patch.assess.model_facts import ModelFacts
from vllm_eagle3_patch.assess.survey import survey
from vllm_eagle3_patch.codemod.patch import Patch
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.patches._discovery import all_patches
from vllm_eagle3_patch.patches.deepseek_v32 import PLATFORM_MODEL, PLATFORM_OUTER, DeepseekV32
from vllm_eagle3_patch.vllm_source.sources import Sources, Text, parse

INTERFACE = (
    "0.8.5",
    "0.8.5.post1",
    "0.9.0",
    "0.9.0.1",
    "0.9.1",
    "0.9.2",
    "0.10.0",
    "0.10.1",
    "0.10.1.1",
    "0.10.2",
)
PATCHABLE = (
    "0.11.0",
    "0.11.1",
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.14.0",
    "0.14.1",
    "0.15.0",
    "0.15.1",
    "0.16.0",
    "0.17.0",
    "0.17.1",
)
NATIVE = tuple(name for name in matrix.names() if name not in INTERFACE + PATCHABLE)
MODELS = "vllm/model_executor/models"
DEEPSEEK = f"{MODELS}/deepseek_v2.py"
STATE = ".vllm-eagle3-patch"


@pytest.fixture(autouse=True)
def every_file_is_composed_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the matrix pins, with ``--harden`` too: else a ``looks_into`` lacks a function."""

    def refuse(self: Patch, text: Text, *_: object, **__: object) -> Text:
        raise AssertionError(f"{text.path}: {self.name} was applied the full way")

    monkeypatch.setattr(Patch, "apply_to", refuse)


def test_every_release_is_in_one_of_the_lists() -> None:
    support = {name: pins(name).support for name in matrix.names()}
    assert len(support) == 45
    assert {name for name, level in support.items() if level == "interface"} == set(INTERFACE)
    assert {name for name, level in support.items() if level == "patch"} == set(PATCHABLE)
    assert {name for name, level in support.items() if level == "native"} == set(NATIVE)


def test_no_cell_of_the_matrix_is_unexplained() -> None:
    for name in matrix.names():
        for model in pins(name).models:
            explained = model.support in ("native", "patch") or model.reason
            assert explained, (name, model.architecture)
            assert model.support != "patch" or model.missing, (name, model.architecture)
            assert model.support == "interface" or not model.missing_patched


@pytest.mark.parametrize("name", PATCHABLE)
def test_patchable(name: str, tmp_path: Path) -> None:
    site_packages = copy_site_packages(name, tmp_path / "site-packages")
    before = snapshot(site_packages)
    fresh = called("check", site_packages, 1)
    assert fresh.document["release"] == {
        "name": name,
        "pinned": True,
        "support": "patch",
        "reason": None,
    }
    assert fresh.document["state"] == "patchable"
    assert not any(model["ready"] for model in fresh.document["models"])
    assert facts_of(fresh) == as_read(name, site_packages)
    planned = called("apply", site_packages, 1, "--dry-run")
    assert snapshot(site_packages) == before, "check or a dry run wrote something"

    applied = called("apply", site_packages, 0)
    assert applied.document["state"] == "patched"
    assert applied.document["changed"] == planned.document["changed"]
    assert digests(applied) == {path: pin.patched for path, pin in pins(name).files.items()}
    ready = {m["architecture"] for m in applied.document["models"] if m["ready"]}
    assert ready == {m.architecture for m in pins(name).models if m.support == "patch"}
    assert {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"} <= ready
    assert (f"{MODELS}/kimi_k25.py" in before) == ("KimiK25ForConditionalGeneration" in ready)
    assert facts_of(applied) == as_read(name, site_packages)
    assert as_old_python_reads_it(name, site_packages, applied)
    assert rules_broken(site_packages) == {}
    assert admits_the_family(site_packages)
    assert called("check", site_packages, 0).document["state"] == "patched"
    assert called("apply", site_packages, 0).document["changed"] == []
    if any(pin.hardened != pin.patched for pin in pins(name).files.values()):
        called("apply", site_packages, 0, "--harden")
        assert rules_broken(site_packages) == {}

    reverted = called("revert", site_packages, 0)
    assert sorted(reverted.document["changed"]) == sorted(applied.document["changed"])
    assert snapshot(site_packages) == before, "revert did not bring everything back"
    assert called("revert", site_packages, 0).document["changed"] == []


@pytest.mark.parametrize("name", INTERFACE)
def test_interface_only(name: str, tmp_path: Path) -> None:
    site_packages = small_copy(name, tmp_path / "site-packages")
    before = snapshot(site_packages)
    fresh = called("check", site_packages, 4)
    assert fresh.document["release"]["support"] == "interface"
    assert fresh.document["release"]["reason"]
    assert facts_of(fresh) == as_read(name, site_packages)
    assert called("apply", site_packages, 4).document["changed"] == []
    assert snapshot(site_packages) == before
    applied = called("apply", site_packages, 0, "--interface-only")
    assert digests(applied) == {path: pin.patched for path, pin in pins(name).files.items()}
    assert as_old_python_reads_it(name, site_packages, applied)
    assert rules_broken(site_packages) == {}
    assert admits_the_family(site_packages)
    afterwards = called("check", site_packages, 4)
    assert afterwards.document["state"] == "patched"
    assert facts_of(afterwards) == as_read(name, site_packages)
    assert not any(model["ready"] for model in afterwards.document["models"])
    assert called("check", site_packages, 0, "--interface-only")
    called("revert", site_packages, 0)
    assert snapshot(site_packages) == before


NATIVE_RULES = ("plain", "order", "same", "middle")
"""What vLLM's own way holds in every release that has it."""


@pytest.mark.parametrize("name", NATIVE)
def test_native(name: str, tmp_path: Path) -> None:
    site_packages = small_copy(name, tmp_path / "site-packages")
    before = snapshot(site_packages)
    fresh = called("check", site_packages, 1)
    assert fresh.document["release"]["support"] == "native"
    ready = {m["architecture"] for m in fresh.document["models"] if m["ready"]}
    assert ready == {m.architecture for m in pins(name).models if m.support == "native"}
    assert {"DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"} <= ready
    assert facts_of(fresh) == as_read(name, site_packages)
    broken = rules_broken(site_packages)
    assert not {rule for _, rule in broken} & set(NATIVE_RULES)
    assert all(rule == "first" or rule in HARDENED for _, rule in broken)

    applied = called("apply", site_packages, 0)
    assert digests(applied) == {path: pin.patched for path, pin in pins(name).files.items()}
    assert all(model["ready"] for model in applied.document["models"])
    assert not {DEEPSEEK, "vllm/v1/worker/gpu_model_runner.py"} & set(applied.document["changed"])
    assert facts_of(applied) == as_read(name, site_packages)

    hardened = called("apply", site_packages, 0, "--harden")
    assert digests(hardened) == {path: pin.hardened for path, pin in pins(name).files.items()}
    assert as_old_python_reads_it(name, site_packages, hardened)
    assert rules_broken(site_packages) == {}
    called("revert", site_packages, 0)
    assert snapshot(site_packages) == before


HARDENED = ("first", "last", "subclass", "bad_ids", "default_ids")
"""What some native release does not hold without ``--harden``."""


def pins(name: str) -> matrix.Release:
    found = matrix.load(name)
    assert found is not None
    return found


def called(command: str, site_packages: Path, code: int, *more: str) -> Ended:
    """Run a command with ``--json`` that must end with an exit code."""
    ended = run(command, "--site-packages", site_packages, "--json", *more)
    assert ended.exit_code == code, ended.stdout[-2000:] + ended.stderr
    return ended


def digests(ended: Ended) -> dict[str, str]:
    return {file["path"]: file["sha256"] for file in ended.document["files"]}


def facts_of(ended: Ended) -> set[tuple[object, ...]]:
    """What a command said of each model."""
    return {
        (
            model["architecture"],
            tuple(model["missing"]),
            model["reason"],
            tuple(limit["code"] for limit in model["limits"]),
        )
        for model in ended.document["models"]
    }


def as_read(name: str, site_packages: Path) -> set[tuple[object, ...]]:
    """The same, read from the source now and not taken from the matrix.

    Only from files that the matrix pins: else a change of another would go unnoticed.
    """
    parsed: set[str] = set()

    class Recorded(Sources):
        def module(self, path: str) -> ast.Module:
            parsed.add(path)
            return super().module(path)

    facts: tuple[ModelFacts, ...] = survey(Recorded(site_packages))
    release = pins(name)
    assert parsed <= {*release.files, *release.evidence}
    return {(f.architecture, f.missing, f.reason, f.limits) for f in facts}


def as_old_python_reads_it(name: str, site_packages: Path, applied: Ended) -> bool:
    """What was written parses with the grammar of the oldest Python that the release admits."""
    oldest = re.search(r">=\s*3\.(\d+)", pins(name).requires_python)
    assert oldest is not None
    for path in applied.document["changed"]:
        content = (site_packages / path).read_bytes()
        parse(content, path, feature_version=(3, int(oldest[1])))
        compile(content, path, "exec", dont_inherit=True)
    return True


def subjects(site_packages: Path) -> Iterator[tuple[str, Subject]]:
    """Every collecting class of an installation: DeepSeek-V2's, and one a platform file."""
    deepseek = (site_packages / DEEPSEEK).read_bytes()
    interfaces = (site_packages / MODELS / "interfaces.py").read_bytes()
    yield DEEPSEEK, Subject(deepseek, extra_sources=[interfaces])
    for path in DeepseekV32().paths(Sources(site_packages)):
        source = (site_packages / path).read_bytes()
        extra = [deepseek, interfaces]
        yield path, Subject(source, PLATFORM_MODEL, PLATFORM_OUTER, extra_sources=extra)


def rules_broken(site_packages: Path) -> dict[tuple[str, str], str]:
    """The semantic rules that a class breaks, by file and rule."""
    return {
        (path, rule): said
        for path, subject in subjects(site_packages)
        for rule, said in check_all(subject, rules=ALL_RULES).items()
        if said != "ok"
    }


def admits_the_family(site_packages: Path) -> bool:
    """The patched config admits the family for each method and still refuses others."""
    (allowlist,) = (patch for patch in all_patches() if patch.name == "eagle3-allowlist")
    (path,) = allowlist.paths(Sources(site_packages))
    source = (site_packages / path).read_bytes()
    admits = allowlist_check(source)
    methods = ["eagle3"]
    if b'"extract_hidden_states"' in source:
        methods.append("extract_hidden_states")
    for method in methods:
        for model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"):
            assert admits(method, model_type), (method, model_type)
        assert admits(method, "llama")
        assert not admits(method, "deepseek"), "DeepSeek V1 is no model of the family"
        assert not admits(method, "mamba")
    assert admits("ngram", "mamba"), "other methods are not concerned"
    return True


def allowlist_check(source: bytes) -> Callable[[str, str], bool]:
    """The release's own test of the target's model type, taken out of its validator and run.

    Returns:
        A function of a method and a model type: whether the config admits them.
    """
    (found,) = (
        (before, test)
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for before, test in zip([ast.Pass(), *function.body], function.body, strict=False)
        if isinstance(test, ast.If)
        and "hf_text_config.model_type" in ast.unparse(test.test)
        and isinstance(test.body[0], ast.Raise)
    )
    before, test = found
    statements: list[ast.stmt] = [before, test] if isinstance(before, ast.Assign) else [test]
    code = compile(ast.Module(statements, []), "config", "exec")

    class Stand:
        def __init__(self, **attributes: object) -> None:
            self.__dict__.update(attributes)

    def admits(method: str, model_type: str) -> bool:
        text = Stand(model_type=model_type)
        config = Stand(method=method, target_model_config=Stand(hf_text_config=text))
        try:
            exec(code, {"self": config})
        except ValueError:
            return False
        return True

    return admits


@pytest.mark.parametrize("name", PATCHABLE)
def test_stock_forward_fails_the_rules_about_layer_ids(name: str) -> None:
    outcome = check_all(Subject((fetch(name) / DEEPSEEK).read_bytes()))
    assert outcome["plain"] == "ok"
    assert all(outcome[rule] != "ok" for rule in ("order", "first", "last", "bad_ids"))


def test_every_release_pins_its_record() -> None:
    for name in matrix.names():
        marker = (fetch(name) / ".record-sha256").read_text().strip()
        pinned = (matrix.RELEASES / f"{name}.toml").read_text(encoding="utf-8")
        assert f'\nrecord_sha256 = "{marker}"\n' in pinned
