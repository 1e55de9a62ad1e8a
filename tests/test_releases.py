"""Every release of vLLM that can be patched, for real: fetched, checked, patched, reverted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from command_line import run, snapshot
from semantics import Subject, check_all
from tools.fetch_release import copy_site_packages, fetch
from tools.write_matrix import describe
from vllm_eagle3_patch import matrix
from vllm_eagle3_patch.sources import parse

PATCHABLE = (
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
DEEPSEEK = "vllm/model_executor/models/deepseek_v2.py"
SPECULATIVE = "vllm/config/speculative.py"
KIMI_K25 = "vllm/model_executor/models/kimi_k25.py"


@pytest.fixture(scope="module", params=PATCHABLE)
def release(request: pytest.FixtureRequest) -> str:
    """The release's version."""
    return str(request.param)


@pytest.fixture
def site_packages(release: str, tmp_path: Path) -> Path:
    """A fresh copy of the release's files, as pip would have laid them out."""
    return copy_site_packages(release, tmp_path / "site-packages")


def oldest_python(release: str) -> tuple[int, int]:
    """The oldest Python that a release admits."""
    pins = matrix.load(release)
    assert pins is not None
    found = re.search(r">=\s*3\.(\d+)", pins.requires_python)
    assert found is not None
    return 3, int(found[1])


def test_check_apply_check_revert(release: str, site_packages: Path) -> None:
    before = snapshot(site_packages)
    here = ("--site-packages", site_packages)

    first = run("check", *here, "--json")
    assert first.exit_code == 1, first.stderr
    assert first.document["release"] == {
        "name": release,
        "pinned": True,
        "support": "patch",
        "reason": None,
    }
    assert first.document["state"] == "patchable"
    assert not any(model["ready"] for model in first.document["models"])
    assert snapshot(site_packages) == before, "check wrote something"

    planned = run("apply", *here, "--dry-run", "--json")
    assert planned.exit_code == 1
    assert snapshot(site_packages) == before, "a dry run wrote something"

    applied = run("apply", *here, "--json")
    assert applied.exit_code == 0, applied.stderr
    assert applied.document["changed"] == planned.document["changed"]
    assert applied.document["state"] == "patched"
    pins = matrix.load(release)
    assert pins is not None
    patched = {path: pin.patched for path, pin in pins.files.items()}
    assert {f["path"]: f["sha256"] for f in applied.document["files"]} == patched
    for path in applied.document["changed"]:
        content = (site_packages / path).read_bytes()
        parse(content, path, feature_version=oldest_python(release))
        compile(content, path, "exec", dont_inherit=True)

    second = run("check", *here, "--json")
    assert second.exit_code == 0
    ready = {m["architecture"] for m in second.document["models"] if m["ready"]}
    can_be = {m.architecture for m in pins.models if m.support == "patch"}
    assert ready == can_be
    assert {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"} <= ready
    assert ("KimiK25ForConditionalGeneration" in ready) == (site_packages / KIMI_K25).exists()

    again = run("apply", *here, "--json")
    assert (again.exit_code, again.document["changed"]) == (0, [])

    reverted = run("revert", *here, "--json")
    assert reverted.exit_code == 0, reverted.stderr
    assert sorted(reverted.document["changed"]) == sorted(applied.document["changed"])
    assert snapshot(site_packages) == before, "revert did not bring everything back"
    assert run("revert", *here).exit_code == 0, "nothing to revert is success"


def test_patched_forward_follows_every_rule(release: str, site_packages: Path) -> None:
    assert run("apply", "--site-packages", site_packages).exit_code == 0
    subject = Subject((site_packages / DEEPSEEK).read_bytes())
    assert set(check_all(subject).values()) == {"ok"}


def test_stock_forward_fails_the_rules_about_layer_ids(release: str) -> None:
    subject = Subject((fetch(release) / DEEPSEEK).read_bytes())
    outcome = check_all(subject)
    assert outcome["plain"] == "ok"
    assert all(outcome[rule] != "ok" for rule in ("order", "first", "last", "bad_ids"))


def test_patched_config_admits_the_family_and_still_refuses_others(
    release: str, site_packages: Path
) -> None:
    assert run("apply", "--site-packages", site_packages).exit_code == 0
    admits = allowlist_check((site_packages / SPECULATIVE).read_bytes())
    methods = ["eagle3"]
    if b"extract_hidden_states" in (site_packages / SPECULATIVE).read_bytes():
        methods.append("extract_hidden_states")
    for method in methods:
        for model_type in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"):
            assert admits(method, model_type), (method, model_type)
        assert admits(method, "llama")
        assert not admits(method, "deepseek"), "DeepSeek V1 is no model of the family"
        assert not admits(method, "mamba")
    assert admits("ngram", "mamba"), "other methods are not concerned"


def allowlist_check(source: bytes):  # type: ignore[no-untyped-def]
    """The release's own test of the target's model type, taken out of its validator and run.

    Returns:
        A function of a method and a model type: whether the config admits them.
    """
    module = ast.parse(source)
    statements: list[ast.stmt] = []
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        for assign, test in zip(function.body, function.body[1:], strict=False):
            if (
                isinstance(assign, ast.Assign)
                and isinstance(assign.value, ast.List)
                and isinstance(test, ast.If)
                and "hf_text_config.model_type" in ast.unparse(test.test)
            ):
                statements = [assign, test]
    assert statements, "the release's validator has no such test"
    code = compile(ast.Module(statements, []), "speculative.py", "exec")

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


def test_matrix_is_what_the_wheel_holds(release: str) -> None:
    described = describe(release, fetch(release))
    pins = matrix.load(release)
    assert pins is not None
    assert {p: f["original"] for p, f in described["files"].items()} == {
        path: pin.original for path, pin in pins.files.items()
    }
    assert {p: f["patched"] for p, f in described["files"].items()} == {
        path: pin.patched for path, pin in pins.files.items()
    }
    assert described["record_sha256"] == pins.record_sha256
    assert {a: m["support"] for a, m in described["models"].items()} == {
        model.architecture: model.support for model in pins.models
    }
