"""One run of the command ``doctor``: the diagnosis, the copy to write, the metrics; one ending."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch import __version__
from vllm_eagle3_patch.cli.termination import Ending
from vllm_eagle3_patch.doctor.serve_options import ServeOptions, length, parse_serve
from vllm_eagle3_patch.output.blocks import Line, print_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm_eagle3_patch.doctor.diagnosis import Diagnosis
    from vllm_eagle3_patch.doctor.draft_config import Written
    from vllm_eagle3_patch.doctor.metrics.acceptance import MetricsReport
    from vllm_eagle3_patch.installation.find import Where
    from vllm_eagle3_patch.output.blocks import Block

_AS_GIVEN = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "num_speculative_tokens",
    "method",
)


def run(where: Where, given: Mapping[str, Any]) -> Ending:
    """Run it.

    Args:
        where: Which vLLM.
        given: The command line's options, by their names in Python.

    Raises:
        PatchError: Something that was named is not there, or cannot be read or written.
    """
    report = None
    if given["metrics"] is not None:
        from vllm_eagle3_patch.doctor.metrics import acceptance

        report = acceptance.read(given["metrics"], given["previous"])
    if given["draft"] is None:
        assert report is not None
        return _of_metrics(report)
    from vllm_eagle3_patch.doctor.command import diagnose

    diagnosis = diagnose(
        given["target"],
        given["draft"],
        _options(given),
        where,
        release=given["release"],
        convention=given["convention"],
    )
    written = None
    if given["write_draft_config"] is not None:
        from vllm_eagle3_patch.doctor import draft_config

        written = draft_config.write(diagnosis.situation, given["write_draft_config"])
        diagnosis = replace(diagnosis, corrected_draft=str(written.folder))
    code, verdict = diagnosis.exit_code, diagnosis.verdict
    if report is not None and report.exit_code > code:
        code, verdict = report.exit_code, report.exit_class
    return Ending(
        code,
        lambda: {
            **_document(diagnosis, written, report),
            "exit_code": code,
            "verdict": verdict,
        },
        lambda: print_blocks(_blocks(diagnosis, written, report)),
    )


def _options(given: Mapping[str, Any]) -> ServeOptions:
    """The options given one by one, and where none was those of ``--serve``."""
    values = {name: given[name] for name in _AS_GIVEN}
    tokens = None if given["max_model_len"] is None else length(given["max_model_len"])
    single = ServeOptions(**values, max_model_len=tokens)
    if given["serve"] is None:
        return single
    return single.over(parse_serve(given["serve"]))


def _of_metrics(report: MetricsReport) -> Ending:
    def document() -> dict[str, Any]:
        return {
            "schema": 1,
            "tool": __version__,
            "command": "doctor",
            "exit_code": report.exit_code,
            "verdict": report.exit_class,
            "metrics": report.document(),
        }

    return Ending(report.exit_code, document, lambda: print_blocks(report.blocks()))


def _document(
    diagnosis: Diagnosis, written: Written | None, report: MetricsReport | None
) -> dict[str, Any]:
    document = diagnosis.document()
    if written is not None:
        document["draft_config"] = {
            "folder": str(written.folder),
            "changes": list(written.changes),
            "notes": list(written.notes),
        }
    if report is not None:
        document["metrics"] = report.document(diagnosis)
    return document


def _blocks(
    diagnosis: Diagnosis, written: Written | None, report: MetricsReport | None
) -> Iterator[Block]:
    from vllm_eagle3_patch.doctor import render

    graver = report is not None and report.exit_code > diagnosis.exit_code
    yield from render.blocks(diagnosis, report.exit_class if report and graver else None)
    if written is not None:
        yield from render.written_blocks(written)
    if report is not None:
        yield Line("")
        yield from report.blocks(diagnosis)
