"""What holds for one model of an installation, from the matrix or read from the source."""

from __future__ import annotations

from typing import NamedTuple


class ModelFacts(NamedTuple):
    """What holds for one model.

    Attributes:
        missing: The names of the patches that it lacks.
        reason: Why no patch makes it ready, or None.
        engine: Whether that reason is the engine's and not the model's.
        limits: Codes of the conditions under which it does not work (see ``limits``).
        ground: Why it is called ready: ``release``, ``verified`` or ``unproven`` (see ``grounds``).
        refuted: What ``verify`` showed to be wrong with this very content, or None.
    """

    architecture: str
    model_types: tuple[str, ...]
    missing: tuple[str, ...]
    reason: str | None
    engine: bool
    limits: tuple[str, ...]
    ground: str | None = None
    refuted: str | None = None

    @property
    def interface(self) -> bool:
        """Whether the model's part of the interface holds, whatever the engine does with it."""
        return not self.missing

    @property
    def ready(self) -> bool:
        """Whether a server with this target and an EAGLE-3 draft model would speculate."""
        return self.looks_ready and self.refuted is None

    @property
    def looks_ready(self) -> bool:
        """Whether reading it shows nothing that keeps it from being ready."""
        return not self.missing and self.reason is None
