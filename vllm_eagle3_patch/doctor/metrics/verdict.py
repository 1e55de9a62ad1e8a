"""What the figures mean: the thresholds, each with its source, and the verdict.

Sources are the public reports by number, and runs on a GPU with a small trained model. A
threshold marked [ours] is a choice of this tool, with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.metrics.figures import REFERENCE_POSITIONS, interval

if TYPE_CHECKING:
    from vllm_eagle3_patch.doctor.metrics.figures import Counts

HEALTHY = "healthy"
SUSPICIOUS = "suspicious"
STRUCTURAL = "structural"
IMPOSSIBLE = "impossible"
TOO_FEW = "too-few-drafts"
NO_DATA = "no-data"

CLASSES = {
    HEALTHY: "ok",
    NO_DATA: "risky",
    TOO_FEW: "risky",
    SUSPICIOUS: "risky",
    IMPOSSIBLE: "risky",
    STRUCTURAL: "broken",
}
"""The verdict of ``doctor`` for each; from good to bad. Nothing is ok without evidence."""

EXIT_CODES = {"ok": 0, "risky": 1, "broken": 4}

LOW_FIRST_POSITION = 0.2
"""Position 0 below it means the layers or a norm (report 30: about 0.10 for 0.45; 31: 0.036)."""

DRAFTS_FOR_NOTHING = 103
"""Drafts without one accepted token that mean more than chance.

With so many, Wilson's 95 % interval of position 0 ends below 0.036, the lowest that is reported
of a draft model that was loaded and merely got the wrong layers (report 31).
"""

DRAFTS_FOR_A_SHARE = 385
"""Drafts from which a share is known to 0.05 at worst (95 %); with fewer nothing is healthy."""

STEEP = 0.5
"""A position is steep if of the drafts that came so far less than this part of position 0's
share goes on. [ours] A draft model that was trained with 3 unrolled steps and asked for 5 fell
from .996 to .098 (GPU runs); one fed the wrong layers kept .578, .664, .760."""

LENGTHS = {1: 1.69, 2: 2.17, 3: 2.5}
"""The lowest healthy mean acceptance length by k, at most three positions counted.

For k = 3 the lower end of what is usual for this family (reports, rule of thumb below table b).
For 1 and 2 what the same acceptance at every position comes to there. [ours]
"""

USUAL_UP_TO = 3.4
"""The upper end of what is usual at k = 3 (reports, rule of thumb below table b)."""

CUT_SHORT = 0.9
"""Below this part of k tokens a draft in the mean, drafts were cut short. [ours]"""

REPORTED = {
    "CEval": (2.052, 2.836),
    "MT-Bench": (2.345, 2.940),
    "HumanEval": (2.544, 3.372),
    "SWE-bench": (2.553, 2.553),
    "MMStar": (2.597, 2.787),
    "MATH-500": (2.664, 3.490),
    "LiveCodeBench": (2.706, 2.706),
    "GSM8K": (2.79, 3.23),
    "AIME": (2.982, 3.139),
    "BFCL v3": (3.67, 3.81),
}
"""Published mean acceptance lengths at k = 3 by task, lowest and highest, of draft models for
Kimi-K2 to K2.7 (reports, table b). For DeepSeek-V3 and R1 none was found."""

CAVEAT = (
    "A healthy length depends on the task and on k: at k = 3 2.5 to 3.4 is usual for Kimi targets, "
    "less for chat and Chinese, more for mathematics and code; never judge on random prompts "
    "(reports, table b; report 50)."
)

PUBLISHED = "published at k = 3 (reports, table b): " + ", ".join(
    f"{task} {least} to {most}" if least < most else f"{task} {least}"
    for task, (least, most) in REPORTED.items()
)

UNSEEN = (
    "layers that are off by one may cost only 3 % and do not show in figures (report 29): "
    "vllm-eagle3-patch doctor TARGET DRAFT reads them"
)
"""What a healthy verdict does not say."""


@dataclass(frozen=True)
class Judgement:
    """What figures mean.

    Attributes:
        verdict: One of the six words above.
        reason: Why, as a stable code.
        message: Why, in a sentence, with the figures.
        position: The first steep position, if that is the reason.
    """

    verdict: str
    reason: str
    message: str
    position: int | None = None

    @property
    def severity(self) -> int:
        """The higher, the worse."""
        return list(CLASSES).index(self.verdict)


def judge(counts: Counts) -> Judgement:
    """The verdict on the counts of an engine or a model."""
    wrong = counts.impossible()
    if wrong is not None:
        return Judgement(IMPOSSIBLE, "impossible", f"these figures cannot be true: {wrong}")
    if not counts.drafts:
        return Judgement(NO_DATA, "no-drafts", "no drafts yet")
    if not counts.accepted:
        return _nothing_accepted(counts)
    return (
        _first_position(counts) or _steep_position(counts) or _few_drafts(counts) or _length(counts)
    )


def _nothing_accepted(counts: Counts) -> Judgement:
    fact = f"none of {counts.draft_tokens} draft tokens was accepted in {counts.drafts} drafts"
    if counts.drafts < DRAFTS_FOR_NOTHING:
        enough = (
            f"from {DRAFTS_FOR_NOTHING} drafts on that cannot be a draft model that accepts 3.6 % "
            "(report 31)"
        )
        return Judgement(TOO_FEW, "few-drafts", f"{fact}; {enough}")
    meaning = (
        "mean acceptance length exactly 1.00: the draft model's output is not used as it was "
        "trained, whatever the prompts (reports 33, 38, 41)"
    )
    return Judgement(STRUCTURAL, "nothing-accepted", f"{fact}, {meaning}")


def _first_position(counts: Counts) -> Judgement | None:
    """Without counts by position, accepted / drafts is the most that position 0 can be."""
    accepted = counts.by_position[0] if counts.by_position else min(counts.accepted, counts.drafts)
    what = "position 0 accepts" if counts.by_position else "position 0 accepts at most"
    share = accepted / counts.drafts
    low, high = interval(accepted, counts.drafts)
    if low >= LOW_FIRST_POSITION:
        return None
    fact = f"{what} {share:.3f} of {counts.drafts} drafts"
    if high >= LOW_FIRST_POSITION and counts.drafts < DRAFTS_FOR_A_SHARE:
        message = (
            f"{fact}, which so few leave between {low:.2f} and {high:.2f} (Wilson, 95 %), "
            f"on both sides of {LOW_FIRST_POSITION}; {DRAFTS_FOR_A_SHARE} drafts are enough"
        )
        return Judgement(TOO_FEW, "few-drafts", message)
    if share >= LOW_FIRST_POSITION:
        return None
    message = (
        f"{fact}, less than {LOW_FIRST_POSITION}: the draft model gets other layers than it was "
        "trained on, or a norm is missing (reports 30, 31, 42)"
    )
    return Judgement(SUSPICIOUS, "first-position", message)


def _steep_position(counts: Counts) -> Judgement | None:
    """Drafts that may have had no token at a position are not held against it."""
    conditional = counts.conditional_acceptance_by_position
    for position in range(1, len(counts.by_position)):
        before, here = counts.by_position[position - 1 : position + 1]
        asked = before - counts.without_position(position)
        if asked <= 0:
            break
        _, high = interval(min(here, asked), asked)
        share = conditional[position] or 0.0
        if high < STEEP * counts.by_position[0] / counts.drafts:
            message = (
                f"position 0 accepts {counts.acceptance_by_position[0]:.3f}, but of the drafts "
                f"that were accepted up to position {position - 1} only {share:.3f} go on at "
                f"position {position}: the draft model itself, trained with fewer unrolled steps "
                "than k or too little (GPU runs)"
            )
            return Judgement(SUSPICIOUS, "decay", message, position)
    return None


def _few_drafts(counts: Counts) -> Judgement | None:
    if counts.drafts >= DRAFTS_FOR_A_SHARE:
        return None
    message = (
        f"{counts.drafts} drafts are too few to call it healthy: from {DRAFTS_FOR_A_SHARE} on a "
        "share is known to 0.05 (Wilson, 95 %), with fewer only what is far off shows"
    )
    return Judgement(TOO_FEW, "few-drafts", message)


def _length(counts: Counts) -> Judgement:
    length = counts.mean_acceptance_length or 0.0
    reference = counts.reference_length
    lowest = LENGTHS[min(max(counts.positions, 1), REFERENCE_POSITIONS)]
    if reference is None:
        # Acceptance does not rise by position, so the first three have at least their part.
        least = 1 + (length - 1) * REFERENCE_POSITIONS / counts.positions
        if least < lowest <= length:
            message = (
                f"mean acceptance length {length:.3f} at k = {counts.positions} without counts "
                "by position can be healthy or not"
            )
            return Judgement(NO_DATA, "no-positions", message)
        reference = min(length, least)
    fact = f"mean acceptance length {length:.3f} at k = {counts.positions}"
    if counts.positions > REFERENCE_POSITIONS and counts.by_position:
        fact = f"{fact} ({reference:.3f} from the first three positions alone)"
    cut = ""
    if counts.draft_tokens < CUT_SHORT * counts.positions * counts.drafts:
        mean = counts.draft_tokens_per_draft or 0.0
        cut = f"; drafts hold only {mean:.2f} tokens in the mean, which shortens it"
    if reference < lowest:
        message = f"{fact} is below {lowest}, the least that is usual{_tasks(counts, length)}{cut}"
        return Judgement(SUSPICIOUS, "length", message)
    if counts.positions >= REFERENCE_POSITIONS and reference > USUAL_UP_TO:
        usual = f"is above the usual {lowest} to {USUAL_UP_TO}: repeated or made-up prompts flatter"
        return Judgement(HEALTHY, "length", f"{fact} {usual} (report 50){cut}")
    message = f"{fact} is not below {lowest}, the least that is usual{cut}"
    return Judgement(HEALTHY, "length", message)


def _tasks(counts: Counts, length: float) -> str:
    """The tasks for which so low a length is published, at k = 3."""
    if counts.positions != REFERENCE_POSITIONS:
        return ""
    tasks = [task for task, (least, most) in REPORTED.items() if least <= length <= most]
    return f" (published for {', '.join(tasks)} only)" if tasks else " (published for no task)"
