"""Diff: the unified diff that ``apply`` would make, or has made."""

from __future__ import annotations

from vllm_eagle3_patch.assess.classify import classify
from vllm_eagle3_patch.assess.decision import Options
from vllm_eagle3_patch.assess.plan import MODIFIED, plan, unified_diff, untrusted
from vllm_eagle3_patch.commands.other_runs import in_the_way
from vllm_eagle3_patch.commands.report import Report, about
from vllm_eagle3_patch.installation.find import Where


def diff(where: Where, options: Options) -> Report:
    """The unified diff that apply would make, or has made. Never writes."""
    installation = where.find()
    with about(installation):
        blocked = in_the_way(installation.root)
        if blocked is not None:
            raise blocked
        assessment = classify(installation)
        decided = plan(assessment, options)
        if untrusted(assessment):  # What was made cannot be told from what was there.
            decided = decided._replace(exit_code=MODIFIED)
        if decided.exit_code > 1:
            return Report.of("diff", assessment, decided)
        after = {change.path: change.after for change in decided.changes}
        originals = assessment.originals
        text = "".join(
            unified_diff(
                status.path,
                originals.read(status.path) or b"",
                after.get(status.path) or assessment.sources.read(status.path) or b"",
            )
            for status in assessment.files
        )
        code = 1 if text else 0
        return Report(
            "diff", code, decided.state, installation, assessment, assessment.problems, diff=text
        )
