"""What running an installation's code showed, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CENTRAL = "aux-hidden-states"
"""The check without which nothing is proven of a model."""


@dataclass(frozen=True)
class CheckResult:
    """How one check ended.

    Attributes:
        name: Its name, such as ``interface``.
        ok: Whether what it asserts holds; None if it does not apply or could not be run here.
        detail: What was seen, or why there was nothing to see, on one line.
    """

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class ModelResult:
    """What was found of one model.

    Attributes:
        architecture: Its name in vLLM's registry.
        checks: Its checks, in the order in which they were made.
    """

    architecture: str
    checks: tuple[CheckResult, ...]

    @property
    def proven(self) -> tuple[CheckResult, ...]:
        """The checks that hold."""
        return tuple(check for check in self.checks if check.ok)

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that do not hold."""
        return tuple(check for check in self.checks if check.ok is False)

    @property
    def applicable(self) -> tuple[CheckResult, ...]:
        """The checks that say something of it; all of them if its class could not be tried."""
        return (*self.proven, *self.failed) if self.loaded else self.checks

    @property
    def loaded(self) -> bool:
        """Whether its class could be tried at all; ``import`` is the first check."""
        return not self.checks or self.checks[0].ok is not None

    @property
    def ok(self) -> bool | None:
        """Whether every check holds; None if none fails but its forward could not be run."""
        if self.failed:
            return False
        return True if any(check.name == CENTRAL for check in self.proven) else None


@dataclass(frozen=True)
class Verification:
    """What running the installation's own code showed.

    Attributes:
        seconds: How long all of it took.
        import_seconds: How long importing torch and vLLM took, of that.
        gpu_context: Whether a GPU context was made; it is not meant to.
        models: The models in question.
        unexpected: The failures that no patch that is still to be made explains.
    """

    seconds: float
    import_seconds: float
    gpu_context: bool
    models: tuple[ModelResult, ...]
    unexpected: tuple[tuple[ModelResult, CheckResult], ...] = ()

    def document(self) -> dict[str, Any]:
        """As the JSON of a report has it."""
        return {
            "seconds": self.seconds,
            "import_seconds": self.import_seconds,
            "gpu_context": self.gpu_context,
            "models": [
                {
                    "architecture": model.architecture,
                    "ok": model.ok,
                    "checks": [
                        {"name": check.name, "ok": check.ok, "detail": check.detail}
                        for check in model.checks
                    ],
                }
                for model in self.models
            ],
        }
