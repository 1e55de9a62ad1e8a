"""vLLM's greedy verify loop with transformers and the draft module alone, as a second opinion.

Greedy speculation never changes the text, so the text comes first: then the draft model is started
at every position of it, and the engine's steps are a walk over those drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.acceptance.counting import Counts, count_verified
from benchmarks.acceptance.draft import Cache, Draft
from benchmarks.acceptance.target import boundaries_and_logits


def greedy_texts(target: Any, guess: Tensor, prompts: Sequence[int]) -> Tensor:
    """The target's greedy continuations.

    All positions are answered at once and answers put in place, until nothing changes. The model is
    causal, so such a text is the greedy one; and each round settles at least one more token. A
    good guess settles nearly all in the first.

    Args:
        target: The target.
        guess: Prompts with guessed continuations, ``[count, length]``.
        prompts: How many tokens of each are given.

    Returns:
        The texts, ``[count, length]``.
    """
    lengths = torch.tensor(prompts, device=guess.device)[:, None]
    given = torch.arange(guess.shape[1], device=guess.device) < lengths
    while True:
        _, logits = boundaries_and_logits(target, guess)
        answers = torch.cat([guess[:, :1], logits[:, :-1].argmax(-1)], dim=1)
        settled = torch.where(given, guess, answers)
        if torch.equal(settled, guess):
            return guess
        guess = settled


@torch.no_grad()
def proposals(draft: Draft, embed: nn.Module, texts: Tensor, states: Tensor, ahead: int) -> Tensor:
    """What the draft model proposes when started at each position of each text.

    Args:
        draft: The draft model.
        embed: The target's embedding.
        texts: ``[count, length]``.
        states: The target's states at the boundaries that the draft model is given, be they those
            that it was trained on or not, side by side: ``[count, length, ids * hidden_size]``.
        ahead: How many tokens it drafts.

    Returns:
        ``[count, length - 1, ahead]``.
    """
    tokens, state, cache = texts[:, 1:], draft.fc(states[:, :-1]), Cache()
    drafted = []
    for _ in range(ahead):
        state, logits = draft(state, embed(tokens), cache)
        tokens = logits.argmax(-1)
        drafted.append(tokens)
    return torch.stack(drafted, dim=-1)


def count(texts: Tensor, prompts: Sequence[int], drafted: Tensor, max_tokens: int) -> Counts:
    """The counts that vLLM should report for these requests, together.

    Args:
        texts: ``[count, length]``.
        prompts: How many tokens of each are the prompt.
        drafted: The proposals, ``[count, length - 1, ahead]``.
        max_tokens: How many tokens each request asks for.
    """
    counts = Counts()
    for text, prompt, proposed in zip(texts.tolist(), prompts, drafted.tolist(), strict=True):
        count_verified(counts, text, prompt, proposed, max_tokens)
    return counts
