"""How benchmarks/acceptance counts drafts and accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.acceptance.counting import Counts, count_verified, difference, largest_gap

WRONG = -1


def counted(proposals: dict[int, Sequence[int]], *, prompt: int = 3, max_tokens: int = 6) -> Counts:
    """Count a request whose text is 0, 1, 2, ...; drafts of two tokens, wrong if not given."""
    text = list(range(prompt + max_tokens + 2))
    table = [proposals.get(position, (WRONG, WRONG)) for position in range(len(text) - 1)]
    counts = Counts()
    count_verified(counts, text, prompt, table, max_tokens)
    return counts


def test_each_rejected_draft_yields_one_token() -> None:
    # The prompt's own step gives the first of six tokens.
    assert counted({}) == Counts(5, 10, 0, [0, 0])


def test_accepted_drafts_take_fewer_steps() -> None:
    right = {position: (position + 2, position + 3) for position in range(20)}
    assert counted(right) == Counts(2, 4, 4, [2, 2])


def test_a_token_behind_a_wrong_one_is_not_accepted() -> None:
    behind = {position: (WRONG, position + 3) for position in range(20)}
    assert counted(behind) == Counts(5, 10, 0, [0, 0])


def test_a_draft_may_be_accepted_in_part() -> None:
    half = {position: (position + 2, WRONG) for position in range(20)}
    assert counted(half) == Counts(3, 6, 3, [3, 0])


def test_the_first_draft_starts_at_the_prompts_last_token() -> None:
    # Of the prompt 0, 1, 2 and the sampled 3, the draft model sees states up to token 2.
    assert counted({2: (4, 5)}) == Counts(3, 6, 2, [1, 1])


def test_the_last_step_counts_what_it_accepts_beyond_the_end() -> None:
    right = {position: (position + 2, position + 3) for position in range(20)}
    assert counted(right, max_tokens=5) == Counts(2, 4, 4, [2, 2])


def test_one_token_needs_no_draft() -> None:
    assert counted({}, max_tokens=1) == Counts()


def test_counts_add_up_over_requests() -> None:
    counts = Counts()
    for _ in range(2):
        count_verified(counts, list(range(12)), 3, [(WRONG,)] * 11, 4)
    assert counts.to_json() == {
        "drafts": 6,
        "draft_tokens": 6,
        "accepted": 0,
        "accepted_per_position": [0],
    }


def test_equal_counts_show_no_difference() -> None:
    counts = Counts(10, 20, 12, [8, 4])
    assert difference(counts, Counts(10, 20, 12, [8, 4])) == "none"
    assert largest_gap(counts, Counts(10, 20, 12, [8, 4])) == 0


def test_a_difference_is_signed() -> None:
    assert difference(Counts(11, 22, 10, [7, 3]), Counts(10, 20, 12, [8, 4])) == "+1, -2"


def test_the_gap_is_the_worst_of_drafts_and_positions() -> None:
    assert largest_gap(Counts(11, 22, 11, [5, 6]), Counts(10, 20, 12, [8, 4])) == 0.3


def test_no_drafts_at_all_are_no_division_by_zero() -> None:
    assert largest_gap(Counts(0, 0, 0, [0]), Counts(0, 0, 0, [0])) == 0
