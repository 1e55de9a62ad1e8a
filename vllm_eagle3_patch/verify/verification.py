"""Verify: import the patched modules where the server would, and run what EAGLE-3 needs of them.

Everything else here reads vLLM's source. This starts the server's interpreter, which imports vLLM
and runs its real classes on stand-ins (proof.py, which that interpreter runs).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.ground.errors import VllmNotFoundError, WrongUsageError
from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.ground.text import one_line, shell_word
from vllm_eagle3_patch.installation.interpreter import Question, answer_to, as_path
from vllm_eagle3_patch.verify.results import CheckResult, ModelResult, Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_eagle3_patch.assess.assessment import Assessment
    from vllm_eagle3_patch.assess.model_facts import ModelFacts
    from vllm_eagle3_patch.ground.family import FamilyModel
    from vllm_eagle3_patch.installation.find import Installation

# What vLLM and what it imports would write to while they are imported. Each is a variable that
# names a folder, which is then in the temporary folder.
_PRIVATE = (
    "FLASHINFER_WORKSPACE_BASE",
    "HF_HOME",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
    "TMPDIR",  # torch.distributed leaves a file there unless Python ends in an orderly way
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)
_SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

_LARGEST_OUTPUT = 64 * 1024 * 1024
_SEE_WHY = "see why: {python} -c 'import vllm'"
_HINTS = {
    "shared-library": "install the torch and the system libraries that this vLLM was built for",
    "missing-module": "install what this vLLM requires",
}

# The patches that capture ids 0 and n, which vLLM's own code does not in every release.
_CAPTURE_ALL_IDS = {"aux-layer-bounds", "deepseek-v2"}


def verify(
    installation: Installation,
    assessment: Assessment,
    *,
    models: Sequence[str] | None = None,
    timeout: float,
    progress: Callable[[str], None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Verification:
    """Import an installation's vLLM with its own interpreter and check its models for real.

    Nothing is written but to a temporary folder, which is removed; no process is left behind.

    Args:
        installation: The vLLM in question.
        assessment: What was read of it.
        models: The architectures to check, of those that it ships; all of them by default.
        timeout: Seconds to wait for the interpreter.
        progress: Told what is going on, a line each time, before something that takes long.
        environ: The environment that the server would have; by default our own.

    Raises:
        WrongUsageError: No interpreter is known, as with ``--site-packages``.
        VllmNotFoundError: It cannot import vLLM (code ``cannot-import``), imports another one, or
            takes too long (code ``timeout``).
        NotWritableError: The temporary folder takes nothing more.
    """
    python = interpreter_of(installation)
    started = time.monotonic()
    shipped = [facts.architecture for facts in assessment.facts]
    chosen = [
        model
        for model in FAMILY
        if model.architecture in shipped and (models is None or model.architecture in models)
    ]
    if not chosen:
        return Verification(0.0, 0.0, gpu_context=False, models=())
    if progress is not None:
        version = installation.version or "of unknown version"
        progress(f"importing vLLM {version} with {one_line(python)} (8 to 16 s) ...")
    question = Question(
        script=Path(__file__).with_name("proof.py"),
        purpose="while importing vLLM or running its models",
        timeout=timeout,
        hint=_see_why(python),
        largest_output=_LARGEST_OUTPUT,
        private=_PRIVATE,
        code="cannot-import",
        timeout_code="timeout",
        timeout_hint=f"allow more with --timeout SECONDS, or {_see_why(python)}",
    )
    request: dict[str, Any] = {
        "models": [_request(model) for model in chosen],
        "edges": _edges(assessment),
    }
    environ = os.environ if environ is None else environ
    document = answer_to(question, python, {**environ, **_SETTINGS}, json.dumps(request))
    with question.understood(python):
        _imported(document, python, installation)
        results = tuple(_result(given, request["models"]) for given in document["models"])
        return Verification(
            seconds=round(time.monotonic() - started, 2),
            import_seconds=float(document["import_seconds"]),
            gpu_context=bool(document["gpu_context"]),
            models=results,
            unexpected=unexpected(results, assessment),
        )


def interpreter_of(installation: Installation | None) -> Path:
    """The interpreter that runs an installation's vLLM.

    Raises:
        WrongUsageError: None is known.
    """
    if installation is None or installation.python is None:
        raise WrongUsageError(
            "verify needs the interpreter that runs vLLM",
            "name it with --python PATH instead of --site-packages DIR",
        )
    return Path(installation.python)


def unexpected(
    models: Iterable[ModelResult], assessment: Assessment
) -> tuple[tuple[ModelResult, CheckResult], ...]:
    """The failures that no patch that is still to be made explains.

    A patch whose marks are in a file counts as made: that it does not hold is then a failure.
    """
    made = {
        name
        for status in assessment.files
        if status.state in ("patched", "modified")
        for name in status.patches
    }
    facts = {f.architecture: f for f in assessment.facts}
    return tuple(
        (model, check)
        for model in models
        for check in model.failed
        if not _explained(check, facts[model.architecture], made)
    )


def _explained(check: CheckResult, facts: ModelFacts, made: Iterable[str]) -> bool:
    lacking = {name for name in facts.missing if name not in made}
    match check.name:
        case "allowlist":
            return "eagle3-allowlist" in lacking
        case "image-token":
            return "multimodal-image-token" in lacking
        case "import":
            return False
        case _:
            others = {"eagle3-allowlist", "multimodal-image-token", "draft-attention-metadata"}
            return bool(lacking - others)


def _see_why(python: Path) -> str:
    return _SEE_WHY.format(python=shell_word(python))


def _request(model: FamilyModel) -> dict[str, Any]:
    request: dict[str, Any] = {
        "architecture": model.architecture,
        "text_types": model.text_types,
    }
    if model.wrapper is not None:
        path, name = model.wrapper.language_model
        request["language_model"] = f"{_dotted(path)}:{name}"
        request["image_token"] = model.wrapper.image_token
    return request


def _edges(assessment: Assessment) -> list[str]:
    """The modules that we made to capture ids 0 and ``n``."""
    return [
        _dotted(status.path)
        for status in assessment.files
        if status.state in ("patched", "modified") and _CAPTURE_ALL_IDS & set(status.patches)
    ]


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _imported(document: dict[str, Any], python: Path, installation: Installation) -> None:
    """What was imported is the vLLM in question.

    Raises:
        VllmNotFoundError: It is not, or nothing could be imported.
    """
    error = document["error"]
    if error is not None:
        raise VllmNotFoundError(
            f"{one_line(python)} cannot import vLLM: {one_line(error['message'])}",
            _HINTS.get(error["kind"], _see_why(python)),
            code="cannot-import",
        )
    package = as_path(document["package"])
    if not (package.exists() and package.samefile(installation.package)):
        raise VllmNotFoundError(
            f"{one_line(python)} imports vLLM from {one_line(package)}, "
            f"not from {one_line(installation.package)}",
            _see_why(python),
            code="cannot-import",
        )


def _result(document: dict[str, Any], requested: Iterable[dict[str, Any]]) -> ModelResult:
    """What was found of a model; raises if it is none of those that were asked about."""
    architecture = document["architecture"]
    if architecture not in {request["architecture"] for request in requested}:
        raise ValueError("a model that was not asked about")
    checks = tuple(
        CheckResult(one_line(check["name"]), check["ok"], one_line(check["detail"]))
        for check in document["checks"]
    )
    return ModelResult(architecture, checks)
