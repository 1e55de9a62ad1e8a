"""What running the code of the models showed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.output.blocks import BLANK, Block, Columns, Line
from vllm_eagle3_patch.verify.results import Verification

if TYPE_CHECKING:
    from collections.abc import Iterator


_RESULTS = {True: "passed", False: "failed", None: "not run"}


def verification_blocks(verification: Verification) -> Iterator[Block]:
    """What was proven of each model, what failed that should not, and what could not be run."""
    if not verification.models:
        return
    results = [(model, _RESULTS[model.ok]) for model in verification.models]
    yield Columns(
        ("model", "result", "proven", "failed"),
        tuple(
            (
                model.architecture,
                result,
                ", ".join(check.name for check in model.proven) or "-",
                ", ".join(check.name for check in model.failed) or "-",
            )
            for model, result in results
        ),
        narrow=Columns(
            ("model", "result", "proven"),
            tuple(
                (
                    model.architecture,
                    result,
                    f"{len(model.proven)} of {len(model.applicable)}",
                )
                for model, result in results
            ),
        ),
    )
    yield BLANK
    failed: dict[str, list[str]] = {}
    for model, check in verification.unexpected:
        failed.setdefault(f"{check.name}: {check.detail}", []).append(model.architecture)
    not_run: dict[str, list[str]] = {}
    loaded = [model.architecture for model in verification.models if model.loaded]
    for model in verification.models:
        # What could not be imported has no other check that is worth a word.
        for check in model.checks if model.loaded else model.checks[:1]:
            if check.ok is None:
                not_run.setdefault(f"{check.name}: {check.detail}", []).append(model.architecture)
    for found, verbs in ((failed, ("failed", "failed")), (not_run, ("not run", "does not apply"))):
        for what, architectures in found.items():
            which = "" if architectures == loaded else f" ({', '.join(architectures)})"
            yield Line(f"{verbs[not what.startswith('import:')]}: {what}{which}")
    context = "a GPU context was made" if verification.gpu_context else "no GPU context was made"
    yield Line(
        f"took {verification.seconds:.1f} s, of which importing vLLM "
        f"{verification.import_seconds:.1f} s; {context}"
    )
