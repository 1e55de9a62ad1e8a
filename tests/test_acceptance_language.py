"""The synthetic language of benchmarks/acceptance."""

from __future__ import annotations

import pytest

from benchmarks.acceptance.language import (
    CLASSES,
    HEADER,
    VOCABULARY,
    WORDS,
    Language,
    prompt_lengths,
)


def test_the_same_seed_gives_the_same_texts() -> None:
    assert Language(3).texts(5, 4, 30) == Language(3).texts(5, 4, 30)


@pytest.mark.parametrize(("rules", "draw"), [(3, 6), (4, 5)], ids=["other draw", "other rules"])
def test_another_seed_gives_other_texts(rules: int, draw: int) -> None:
    assert Language(3).texts(5, 4, 30) != Language(rules).texts(draw, 4, 30)


@pytest.mark.parametrize("length", [1, 2, 3, 30, 31])
def test_texts_have_the_length_asked_for(length: int) -> None:
    assert {len(text) for text in Language().texts(0, 8, length)} == {length}


def test_tokens_are_within_the_vocabulary() -> None:
    tokens = {token for text in Language().texts(0, 200, 60) for token in text}
    assert tokens <= set(range(VOCABULARY))


def test_the_two_automata_write_in_turn() -> None:
    for mode, *body in Language().texts(0, 20, 41):
        assert mode >= 2 * WORDS
        assert all(token < WORDS for token in body[::2])
        assert all(WORDS <= token < 2 * WORDS for token in body[1::2])


def test_the_second_automaton_follows_the_class_of_the_first_ones_new_word() -> None:
    language = Language()
    for text in language.texts(0, 20, 41):
        for position in range(4, 41, 2):
            rule = language.second[text[position - 1] % CLASSES]
            assert text[position] == WORDS + rule[text[position - 2] - WORDS]


def test_nothing_is_left_to_chance_after_the_header() -> None:
    continuations: dict[tuple[int, ...], list[int]] = {}
    for text in Language().texts(0, 20_000, 40):
        header = tuple(text[:HEADER])
        assert continuations.setdefault(header, text) == text


def test_texts_do_not_repeat_themselves() -> None:
    for text in Language().texts(0, 50, 2 * WORDS):
        first = text[1::2]
        assert len(set(first)) == len(first) == WORDS


def test_prompts_are_of_unequal_lengths_and_longer_than_the_header() -> None:
    lengths = prompt_lengths(0, 48)
    assert len(lengths) == 48
    assert len(set(lengths)) > 5
    assert min(lengths) > HEADER
