"""On is right: the states that a running engine returns are the residual stream.

Compared, exactly, with what independent forward hooks saw on the way into each layer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from in_target import draft_model, parity
from in_target.engine import LENGTHS, Watched, prepare_environment, prompts

if TYPE_CHECKING:
    from in_target.engine import Recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--layer-ids", required=True, help="comma-separated sets, space between")
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    prepare_environment(given.cache)
    sets = [tuple(map(int, ids.split(","))) for ids in given.layer_ids.split()]
    given.report.write_text(json.dumps(run(given.target, given.draft, sets)))


def run(target: Path, draft: Path, sets: list[tuple[int, ...]]) -> dict[str, object]:
    import torch

    watched = Watched(target, eager=True)
    with watched.record() as off:
        tokens = watched.generate(prompts())
    found: dict[str, dict[str, object]] = {}
    for layer_ids in sets:
        watched.capture(layer_ids)
        with watched.record() as recording:
            same_tokens = watched.generate(prompts()) == tokens
        found[",".join(map(str, layer_ids))] = {
            "same_tokens": same_tokens,
            "same_logits": all(map(torch.equal, off.logits, recording.logits)),
            **compare(recording, layer_ids),
        }
    watched.off()
    with watched.record() as again:
        watched.generate(prompts())
    fed = draft_model.feed(watched, draft, sets[-1], prompts()[1])
    differences = parity.compare(watched, target, prompts())
    plain = all(forward.states is None for forward in again.forwards)
    return {
        "sets": found,
        "plain_when_off": plain,
        "kinds": kinds(again),
        "parity": differences,
        "draft": fed,
    }


def compare(recording: Recording, layer_ids: tuple[int, ...]) -> dict[str, object]:
    """The states of each forward against the streams; vLLM returns them in layer order."""
    import torch

    wanted = sorted(layer_ids)
    tensors = identical = 0
    largest = 0.0
    for forward in recording.forwards:
        states = forward.states or []
        if len(states) != len(wanted):
            raise SystemExit(f"{len(states)} states came back for the ids {wanted}")
        for layer_id, state in zip(wanted, states, strict=True):
            stream = forward.streams[layer_id]
            tensors += 1
            identical += torch.equal(state, stream)
            largest = max(largest, (state - stream).abs().max().item())
    return {"tensors": tensors, "identical": identical, "largest_difference": largest}


def kinds(recording: Recording) -> dict[str, int]:
    """How many forwards were of each kind; a prompt's position tells.

    A decode forward has one token a request and none at a prompt's start; a chunk goes on with a
    prompt that an earlier forward began; a mixed one holds several runs of positions.
    """
    counted = {"prefill": 0, "chunked prefill": 0, "batch of unequal lengths": 0, "decode": 0}
    for forward in recording.forwards:
        runs = _runs(forward.positions.flatten().tolist())
        lengths = [len(positions) for positions in runs]
        counted["prefill"] += any(positions[0] == 0 for positions in runs)
        counted["chunked prefill"] += any(
            positions[0] > 0 and len(positions) > 1 for positions in runs
        )
        counted["batch of unequal lengths"] += len(set(lengths)) > 1
        counted["decode"] += len(runs) == len(LENGTHS) and set(lengths) == {1}
    return counted


def _runs(positions: list[int]) -> list[list[int]]:
    """Consecutive positions, a list a request."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] + 1 == position:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


if __name__ == "__main__":
    main()
