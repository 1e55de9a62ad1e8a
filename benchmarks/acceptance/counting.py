"""Drafts and accepted tokens, counted as vLLM's scheduler counts them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass
class Counts:
    """The counters that vLLM exports as ``vllm:spec_decode_*``."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one verified draft."""
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted += accepted
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        return asdict(self)


def count_verified(
    counts: Counts,
    text: Sequence[int],
    prompt: int,
    proposals: Sequence[Sequence[int]],
    max_tokens: int,
) -> None:
    """Walk through one request as the engine does, and count.

    The prompt's own step yields one token and a draft. Each further step verifies a draft and
    yields the accepted tokens and one more. The step that reaches ``max_tokens`` counts in full,
    also what it accepts beyond: the scheduler counts first and cuts the output off afterwards.

    Args:
        counts: Where to count.
        text: The target's greedy text, prompt included, longer than ``max_tokens`` by a draft.
        prompt: How many of its tokens are the prompt.
        proposals: ``proposals[position]``, the tokens drafted after the text up to and including
            token ``position + 1``, from the target's states up to ``position``.
        max_tokens: How many tokens the request asks for.
    """
    known = prompt + 1
    while known - prompt < max_tokens:
        proposed = proposals[known - 2]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == text[known + accepted]:
            accepted += 1
        counts.observe(len(proposed), accepted)
        known += accepted + 1


def largest_gap(measured: Counts, expected: Counts) -> float:
    """The largest difference of drafts, or of accepted tokens at a position.

    Returns:
        It as a share of the drafts expected.
    """
    positions = zip(measured.accepted_per_position, expected.accepted_per_position, strict=True)
    gaps = [abs(a - b) for a, b in [(measured.drafts, expected.drafts), *positions]]
    return max(gaps) / max(expected.drafts, 1)


def difference(measured: Counts, expected: Counts) -> str:
    """Drafts and accepted tokens more or fewer than expected, or ``none`` if all is equal."""
    if measured == expected:
        return "none"
    return f"{measured.drafts - expected.drafts:+}, {measured.accepted - expected.accepted:+}"
