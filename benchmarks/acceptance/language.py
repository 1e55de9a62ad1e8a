"""A synthetic language that a tiny model learns in about a minute, yet not at a glance.

A text is written by two automata in turn, after a token for the mode:

    mode, a0, b0, a1, b1, a2, b2, ...        a[i + 1] = first[mode][a[i]]
                                             b[i + 1] = second[a[i + 1] % CLASSES][b[i]]

The rules are tables drawn at random, so that each word has to be learned on its own. After the
first three tokens nothing is left to chance: a trained model has one clear answer at each
position, so its greedy continuation does not hang on rounding. A draft model needs the mode,
which stands far back, and the word before the last one; it finds both in the target's states.

Standard library only.
"""

# Nothing here is secret.
# ruff: noqa: S311

from __future__ import annotations

import random
from collections.abc import Sequence

MODES = 3
CLASSES = 3
WORDS = 48
HEADER = 3
"""How many tokens cannot be foreseen: the mode and the first word of each automaton."""
VOCABULARY = 128


class Language:
    """The rules, drawn from a seed.

    Tokens 0 to 47 are the first automaton's words, 48 to 95 the second's, 96 to 98 the modes.
    """

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.first = [_cycle(draw) for _ in range(MODES)]
        self.second = [_cycle(draw) for _ in range(CLASSES)]

    def text(self, draw: random.Random, length: int) -> list[int]:
        """A text of ``length`` tokens, its header chosen by ``draw``."""
        mode, a, b = draw.randrange(MODES), draw.randrange(WORDS), draw.randrange(WORDS)
        tokens = [2 * WORDS + mode]
        while len(tokens) < length:
            tokens += [a, WORDS + b]
            a = self.first[mode][a]
            b = self.second[a % CLASSES][b]
        return tokens[:length]

    def texts(self, seed: int, count: int, length: int) -> list[list[int]]:
        """Texts of one length: ``[count][length]``."""
        draw = random.Random(seed)
        return [self.text(draw, length) for _ in range(count)]


def prompt_lengths(seed: int, count: int, shortest: int = 5, longest: int = 24) -> list[int]:
    """How much of each text is the prompt: unequal lengths, so that batches are ragged."""
    draw = random.Random(seed)
    return [draw.randint(shortest, longest) for _ in range(count)]


def _cycle(draw: random.Random) -> Sequence[int]:
    """A permutation of the words in one cycle, so that no text soon repeats itself.

    A model could continue a repeating text by copying, without knowing the rules.
    """
    order = draw.sample(range(WORDS), WORDS)
    following = [0] * WORDS
    for word, after in zip(order, [*order[1:], order[0]], strict=True):
        following[word] = after
    return following
