"""The figures of speculative decoding: what the counters come to, and what two scrapes differ by.

A draft is one proposal of the draft model for one request; the target model accepts its tokens
from the left until the first that it rejects, and adds one of its own. So a token at position i
is accepted only if those before it are (vllm/v1/spec_decode/metrics.py, observe_draft, 0.9.0 to
0.33.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.metrics.source import MetricsError
from vllm_eagle3_patch.doctor.metrics.text import ACCEPTED, DRAFT_TOKENS, DRAFTS

if TYPE_CHECKING:
    from vllm_eagle3_patch.doctor.metrics.text import Scrape, Series

_Z = 1.959964
"""Standard deviations that 95 % of a normal distribution lie within."""

SKEW = 0.01
"""Of the drafts: by how much sums may differ, as several API servers or Ray count while they are
read. [ours]"""

REFERENCE_POSITIONS = 3
"""Nearly all published lengths are of three draft tokens (reports, table b)."""


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    It takes trials as independent. Drafts of one request are not quite, so the truth is a little
    wider.

    Args:
        successes: How often it was so.
        trials: Out of how many; with none the share may be anything.
    """
    if trials <= 0:
        return 0.0, 1.0
    share = min(successes / trials, 1.0)
    square = _Z * _Z
    middle = share + square / (2 * trials)
    margin = _Z * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    scale = 1 + square / trials
    return max((middle - margin) / scale, 0.0), min((middle + margin) / scale, 1.0)


@dataclass(frozen=True)
class Counts:
    """The counters of an engine or of several, over all its time or over an interval.

    Attributes:
        drafts: Proposals of the draft model, one a request and step.
        draft_tokens: Tokens that they held. Those that a grammar rules out are not counted from
            0.14 on (vllm/v1/core/sched/scheduler.py, make_spec_decoding_stats).
        accepted: Draft tokens that the target model accepted.
        by_position: Of these how many were at each position, the first being 0; empty where
            the scrape has none.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        positions = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return Counts(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(mine + its for mine, its in positions),
        )

    @property
    def draft_tokens_per_draft(self) -> float | None:
        """The mean number of tokens a draft: k, or less where drafts were cut short."""
        return self.draft_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens out of all draft tokens; it falls with k by construction."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts: tokens that a step of the target model yields, its own included.

        vLLM's own definition (vllm/v1/spec_decode/metrics.py, 0.9.0; report 51).
        """
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of all drafts, the share whose token at each position was accepted."""
        return tuple(a / self.drafts for a in self.by_position) if self.drafts else ()

    @property
    def conditional_acceptance_by_position(self) -> tuple[float | None, ...]:
        """Of the drafts accepted up to the position before, the share accepted here too."""
        before = (self.drafts, *self.by_position)
        return tuple(n / m if m else None for m, n in pairwise(before)) if self.drafts else ()

    @property
    def positions(self) -> int:
        """k as the server was told, or where there is no count by position the mean, rounded up."""
        if self.by_position or not self.drafts:
            return len(self.by_position)
        return -(-self.draft_tokens // self.drafts)

    @property
    def reference_length(self) -> float | None:
        """The mean acceptance length that the first three positions alone would give.

        Comparable between any k of three and more, as a draft model proposes one token after the
        other. None where there are no counts by position for it.
        """
        if self.drafts and self.positions <= REFERENCE_POSITIONS:
            return self.mean_acceptance_length
        if self.drafts and self.by_position:
            return 1 + sum(self.by_position[:REFERENCE_POSITIONS]) / self.drafts
        return None

    def without_position(self, position: int) -> int:
        """How many drafts at most had no token at a position.

        Each of those lacks all later ones too, which bounds their number by the draft tokens
        that are missing to k for every draft.
        """
        missing = self.positions * self.drafts - self.draft_tokens
        return max(missing, 0) // max(self.positions - position, 1)

    def impossible(self) -> str | None:
        """What about these counts cannot be, in words; None if nothing."""
        if self.accepted > self.draft_tokens:
            return f"{self.accepted} accepted tokens are more than {self.draft_tokens} draft tokens"
        if self.draft_tokens and not self.drafts:
            return f"{self.draft_tokens} draft tokens, but no draft"
        return self._impossible_positions() if self.by_position else None

    def _impossible_positions(self) -> str | None:
        for position, (before, here) in enumerate(pairwise((self.drafts, *self.by_position))):
            if here > before:
                than = f"at position {position - 1}" if position else "there are drafts"
                more = f"more tokens were accepted at position {position} ({here})"
                return f"{more} than {than} ({before})"
        slack = SKEW * self.drafts
        if self.draft_tokens > self.positions * self.drafts + slack:
            return (
                f"{self.drafts} drafts of at most {self.positions} tokens "
                f"cannot hold {self.draft_tokens} draft tokens"
            )
        added = sum(self.by_position)
        if abs(added - self.accepted) > slack:
            return f"the positions add up to {added} accepted tokens, not {self.accepted}"
        return None


def counts_of(series: Series) -> Counts:
    """All that a server has counted since it started."""
    by_position = tuple(series.by_position[p] for p in sorted(series.by_position))
    counts = series.counts
    return Counts(counts[DRAFTS], counts[DRAFT_TOKENS], counts[ACCEPTED], by_position)


@dataclass(frozen=True)
class Change:
    """What one series came to in an interval.

    Attributes:
        counts: The difference; after a restart what was counted since.
        reset: Whether its counters started again.
        new: Whether the earlier scrape does not have it.
    """

    counts: Counts
    reset: bool = False
    new: bool = False


def change_of(series: Series, before: Series | None) -> Change:
    """What the counters of one process did between two scrapes.

    They live and end together, so that one that went down means that all started again, also
    those that have since passed their old value. A later start (``_created``) or another number
    of positions means the same.

    Raises:
        MetricsError: The earlier scrape is the later one.
    """
    now = counts_of(series)
    if before is None:
        return Change(now, new=True)
    if _is_later(before, series):
        raise MetricsError(
            "the scrape given as the previous one is the later of the two",
            "give the earlier one to --previous",
            "metrics-order",
        )
    then = counts_of(before)
    difference = _minus(now, then)
    restarted = (
        series.created is not None
        and before.created is not None
        and series.created > before.created
    )
    if difference is None or restarted:
        return Change(now, reset=True)
    return Change(difference)


def _is_later(one: Series, other: Series) -> bool:
    times = ((one.created, other.created), (one.timestamp, other.timestamp))
    return any(a is not None and b is not None and a > b for a, b in times)


def _minus(now: Counts, then: Counts) -> Counts | None:
    """The difference; None if a counter went down."""
    if len(now.by_position) != len(then.by_position):
        return None
    pairs = zip(now.by_position, then.by_position, strict=True)
    difference = Counts(
        now.drafts - then.drafts,
        now.draft_tokens - then.draft_tokens,
        now.accepted - then.accepted,
        tuple(a - b for a, b in pairs),
    )
    values = (
        difference.drafts,
        difference.draft_tokens,
        difference.accepted,
        *difference.by_position,
    )
    return difference if min(values) >= 0 else None


def seconds_between(scrape: Scrape, before: Scrape) -> float | None:
    """The length of the interval by the samples' own timestamps; None where there are none."""
    spans = [
        series.timestamp - then.timestamp
        for key, series in scrape.series.items()
        if (then := before.series.get(key)) is not None
        and series.timestamp is not None
        and then.timestamp is not None
    ]
    return max(spans, default=None)
