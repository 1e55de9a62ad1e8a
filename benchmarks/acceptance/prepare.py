"""Train the models and simulate what vLLM must count: the first step of ``end_to_end``.

Run as ``python -m benchmarks.acceptance.prepare`` by an interpreter that has torch and
transformers. Writes the models and ``expected.json`` beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.acceptance import draft, simulation, target
from benchmarks.acceptance.counting import Counts, largest_gap
from benchmarks.acceptance.language import Language, prompt_lengths
from benchmarks.acceptance.rows import AHEAD, DRAFTS, MAX_TOKENS, PROMPTS, SERVED_AHEAD, id_sets

ATTEMPTS = {
    "mla": ((400, 2e-3), (800, 1e-3), (1600, 5e-4)),
    "plain": ((target.STEPS, 4e-3),),
}
"""Steps and learning rate, until the target is right nearly always."""
RIGHT, USABLE = 0.999, 0.9
"""How often it must be right to stop early, and to be used at all."""
STOPS = (50, 75, 100, 150, 200, 300)
"""After how many steps a draft model may be kept; the last one is the *full* one."""
ENOUGH = 0.3
"""What a draft model must accept of its first position to be kept early."""


def scaled(boundaries: Sequence[Any], factor: float) -> list[Any]:
    """The boundaries as vLLM's float16 has them.

    Against overflow its first layer divides the stream by ``routed_scaling_factor``, and all later
    terms with it (vllm/model_executor/models/deepseek_v2.py); what enters that layer is whole.
    """
    first, *others = boundaries
    return [first, *(boundary / factor for boundary in others)]


class Simulator:
    """The counts to expect of draft models, for one type of numbers.

    Args:
        folder: Where the models are.
        device: Where to compute.
        dtype: The type.
        prompts: How many requests.
    """

    def __init__(self, folder: Path, device: str, dtype: str, prompts: int) -> None:
        self.folder, self.device, self.dtype = folder, device, getattr(torch, dtype)
        self.lengths = prompt_lengths(1, prompts)
        total = max(self.lengths) + MAX_TOKENS + AHEAD + 1
        guess = torch.tensor(Language().texts(1_000_000, prompts, total), device=device)
        model = target.load(folder / "target", device, self.dtype)
        self.texts = simulation.greedy_texts(model, guess, self.lengths)
        self.boundaries, _ = target.boundaries_and_logits(model, self.texts)
        if dtype == "float16":
            self.boundaries = scaled(self.boundaries, model.config.routed_scaling_factor)
        self.embed = model.get_input_embeddings()

    def counts(self, name: str, ids: Sequence[int], ahead: int = AHEAD) -> Counts:
        """What the engine must count for a draft model that is given these boundaries."""
        small = draft.load(self.folder / name, self.device, self.dtype)
        states = target.side_by_side(self.boundaries, ids)
        drafted = simulation.proposals(small, self.embed, self.texts, states, ahead)
        return simulation.count(self.texts, self.lengths, drafted, MAX_TOKENS)


def train_target(folder: Path, attention: str, device: str, dtype: str) -> None:
    """Train the target, again with more steps if it has not learned the language."""
    language = Language()
    for steps, rate in ATTEMPTS[attention]:
        trained = target.train(language, attention, device, steps, rate)
        right = target.share_right(trained, language, device)
        print(f"target: {steps} steps, right {right:.2%} on other texts", flush=True)
        if right >= RIGHT:
            break
    if right < USABLE:
        raise SystemExit("the target has not learned the language")
    target.save(trained, folder / "target", getattr(torch, dtype))


def train_drafts(folder: Path, device: str, dtype: str, prompts: int) -> dict[str, int]:
    """Train the draft models; keep the last weights, and early ones that tell layers apart best.

    Returns:
        After how many steps the early ones were kept.
    """
    model = target.load(folder / "target", device)
    simulator = Simulator(folder, device, dtype, prompts)
    chosen = {}
    for name, own in DRAFTS.items():
        kept = dict(zip(STOPS, draft.train(model, Language(), own, STOPS, device), strict=True))
        telling = {}
        for steps, weights in kept.items():
            draft.save(weights, folder / f"{name}-{steps}", model, own)
            telling[steps] = told_apart(simulator, f"{name}-{steps}", own)
        print(f"{name}: least gap to other ids by steps: {telling}", flush=True)
        chosen[name] = max(telling, key=telling.__getitem__)
        for kind, steps in (("early", chosen[name]), ("full", STOPS[-1])):
            draft.save(kept[steps], folder / f"{name}-{kind}", model, own)
    return chosen


def told_apart(simulator: Simulator, name: str, own: tuple[int, ...]) -> float:
    """How far the counts for other ids are from those for the draft model's own, at the least."""
    right = simulator.counts(name, own)
    if right.accepted_per_position[0] < ENOUGH * right.drafts:
        return 0.0
    others = [simulator.counts(name, ids) for ids in id_sets(own) if ids != own]
    return round(min(largest_gap(other, right) for other in others), 4)


def simulate(
    folder: Path, device: str, dtypes: Iterable[str], prompts: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The requests with their greedy texts by type, and all counts."""
    requests: dict[str, Any] = {"texts": {}}
    rows = []
    for dtype in dtypes:
        simulator = Simulator(folder, device, dtype, prompts)
        texts = simulator.texts.tolist()
        pairs = list(zip(texts, simulator.lengths, strict=True))
        requests["prompts"] = [text[:length] for text, length in pairs]
        requests["texts"][dtype] = [text[length:][:MAX_TOKENS] for text, length in pairs]
        for trained_on, own in DRAFTS.items():
            for kind in ("early", "full"):
                name = f"{trained_on}-{kind}"
                for ahead in (AHEAD, SERVED_AHEAD):
                    rows += [
                        {
                            "dtype": dtype,
                            "draft": name,
                            "ids": list(ids),
                            "ahead": ahead,
                            "counts": asdict(simulator.counts(name, ids, ahead)),
                        }
                        for ids in id_sets(own)
                    ]
    return requests, rows


def main() -> None:
    """Do what is not yet done in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--attention", choices=tuple(target.SHAPES), required=True)
    parser.add_argument("--dtypes", default="bfloat16", help="the first is what is saved")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    options = parser.parse_args()
    folder, dtypes = options.models, options.dtypes.split(",")
    started = time.perf_counter()
    if not (folder / "target" / "tokenizer.json").exists():
        train_target(folder, options.attention, options.device, dtypes[0])
    chosen_file = folder / "early.json"
    if not chosen_file.exists():
        chosen = train_drafts(folder, options.device, dtypes[0], options.prompts)
        chosen_file.write_text(json.dumps(chosen) + "\n", encoding="utf-8")
    trained = time.perf_counter()
    requests, counts = simulate(folder, options.device, dtypes, options.prompts)
    cuda = options.device == "cuda"
    document = {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": options.attention,
        "early_steps": json.loads(chosen_file.read_text(encoding="utf-8")),
        "seconds_to_train": round(trained - started, 1),
        "seconds_to_simulate": round(time.perf_counter() - trained, 1),
        **requests,
        "counts": counts,
    }
    written = folder / "expected.json"
    written.with_suffix(".new").write_text(json.dumps(document) + "\n", encoding="utf-8")
    written.with_suffix(".new").rename(written)


if __name__ == "__main__":
    main()
