"""Train, simulate, run vLLM, compare: ``python -m benchmarks.acceptance``.

Run from the repository's root by an interpreter that has vLLM. ``--python`` names another one for
the runs of vLLM alone, so that several releases meet the same models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.acceptance.counting import Counts, difference, largest_gap
from benchmarks.acceptance.language import Language, prompt_lengths
from benchmarks.acceptance.report import TOLERANCE, last_error
from benchmarks.acceptance.rows import DEFAULT, DRAFTS, LAYERS, SPARSE, shifted

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "acceptance"
EARLY, FULL = 100, 300
"""After how many steps they are kept. Fully trained ones hardly mind neighbouring states."""
HEADINGS = ("configuration", "drafts", "accepted", "per position", "simulated", "difference")


@dataclass(frozen=True)
class Configuration:
    """A draft model, and the layer ids that its config names.

    Attributes:
        draft: The folder of the draft model.
        ids: The ids in its config.
        note: What they are, for the table.
        place: Where they stand: ``top``, ``nested`` in ``eagle_config``, or ``none``.
        convention: What the config says that they count.
    """

    draft: str
    ids: tuple[int, ...]
    note: str
    place: str = "top"
    convention: str = "boundary"

    @property
    def name(self) -> str:
        """As the table shows it."""
        places = {"top": f"{self.ids}", "nested": f"{self.ids} in eagle_config", "none": "left out"}
        said = ", said to be outputs" if self.convention == "output" else ""
        return f"{self.draft}, ids {places[self.place]}{said}: {self.note}"

    def readings(self, *, patched: bool) -> tuple[tuple[int, ...], ...]:
        """The boundaries that vLLM is to use: one answer, or one of several.

        The states are collected on the way through the layers, so the order in the config is
        without effect. Where our patch is in, nested ids are read, and so is what they count.
        Other releases take ids as they are, and older ones do not look into ``eagle_config`` and
        take their default.
        """
        if self.place == "none":
            return (DEFAULT,)
        if patched and self.convention == "output":
            return (tuple(sorted(shifted(self.ids, 1))),)
        ids = tuple(sorted(self.ids))
        return (ids, DEFAULT) if self.place == "nested" and not patched else (ids,)


OUTPUTS = "outputs of layers, right where patched"
CONFIGURATIONS = (
    Configuration("default-full", DEFAULT, "right"),
    Configuration("default-full", shifted(DEFAULT, 1), "one too high"),
    Configuration("default-early", DEFAULT, "right"),
    Configuration("default-early", shifted(DEFAULT, 1), "one too high"),
    Configuration("default-early", shifted(DEFAULT, -1), "one too low"),
    Configuration("sparse-full", SPARSE, "right"),
    Configuration("sparse-full", SPARSE, "the release's default", "none"),
    Configuration("sparse-early", SPARSE, "right"),
    Configuration("sparse-early", shifted(SPARSE, 1), "one too high"),
    Configuration("sparse-early", (4, 1, 6), "in another order"),
    Configuration("sparse-early", (5, 6, 7), "far off"),
    Configuration("sparse-early", SPARSE, "right", "nested"),
    Configuration("sparse-early", SPARSE, "the release's default", "none"),
    Configuration("default-early", shifted(DEFAULT, -1), OUTPUTS, "top", "output"),
    Configuration("default-early", shifted(DEFAULT, -1), OUTPUTS, "nested", "output"),
)
EDGES = (
    Configuration("sparse-early", (0, 4, 6), "the embedding's output"),
    Configuration("sparse-early", (1, 4, LAYERS), "the last layer's output"),
)
"""Not every release that supports EAGLE-3 by itself takes these: ``--edges``."""

Expected = dict[tuple[str, tuple[int, ...]], Counts]


def train(folder: Path, attention: str, device: str, dtype: str) -> None:
    """Train the target and the draft models, as far as the folder lacks them."""
    import torch

    from benchmarks.acceptance import draft, target

    language = Language()
    if not (folder / "target" / "config.json").exists():
        trained = target.train(language, attention, device)
        target.save(trained, folder / "target", getattr(torch, dtype))
    model = target.load(folder / "target", device)
    for name, layer_ids in DRAFTS.items():
        if not (folder / f"{name}-full" / "config.json").exists():
            early, full = draft.train(model, language, layer_ids, (EARLY, FULL), device)
            draft.save(early, folder / f"{name}-early", model, layer_ids)
            draft.save(full, folder / f"{name}-full", model, layer_ids)


def simulate(
    options: argparse.Namespace, configurations: Sequence[Configuration]
) -> tuple[list[list[int]], list[int], Expected]:
    """The greedy texts, the lengths of their prompts, and the counts to expect.

    The counts are for each draft model with each reading of the ids told.
    """
    import torch

    from benchmarks.acceptance import draft, simulation, target

    lengths = prompt_lengths(1, options.prompts)
    total = max(lengths) + options.max_tokens + options.ahead + 1
    guess = torch.tensor(Language().texts(1_000_000, options.prompts, total), device=options.device)
    model = target.load(options.models / "target", options.device)
    texts = simulation.greedy_texts(model, guess, lengths)
    boundaries, _ = target.boundaries_and_logits(model, texts)
    embed = model.get_input_embeddings()
    expected: Expected = {}
    for configuration in configurations:
        small = draft.load(options.models / configuration.draft, options.device)
        for ids in {*configuration.readings(patched=True), *configuration.readings(patched=False)}:
            if (configuration.draft, ids) not in expected:
                states = target.side_by_side(boundaries, ids)
                drafted = simulation.proposals(small, embed, texts, states, options.ahead)
                counts = simulation.count(texts, lengths, drafted, options.max_tokens)
                expected[configuration.draft, ids] = counts
    return texts.tolist(), lengths, expected


def run_vllm(
    options: argparse.Namespace, prompts: list[list[int]], configuration: Configuration | None
) -> dict[str, Any]:
    """One run of vLLM in a process of its own; without a configuration, no speculation.

    Returns:
        What ``speculate`` writes, or ``error``, the end of what the process said.
    """
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.attention == "plain":
        environment["VLLM_MLA_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        asked, answer = Path(scratch) / "prompts.json", Path(scratch) / "answer.json"
        asked.write_text(json.dumps(prompts), encoding="utf-8")
        command = [options.python, "-m", "benchmarks.acceptance.speculate"]
        command += ["--target", options.models / "target", "--prompts", asked, "--out", answer]
        command += ["--device", options.device, "--dtype", options.dtype]
        command += ["--ahead", options.ahead, "--max-tokens", options.max_tokens]
        if configuration is not None:
            command += ["--draft", options.models / configuration.draft]
            command += ["--place", configuration.place]
            command += ["--ids", ",".join(map(str, configuration.ids))]
            command += ["--convention", configuration.convention]
        if options.graphs:
            command.append("--graphs")
        started = time.perf_counter()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = round(time.perf_counter() - started, 1)
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            return {"error": "\n".join(lines[-40:]) or f"exit {done.returncode}"}
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result | {"seconds": seconds}


def compare(
    configuration: Configuration,
    result: dict[str, Any],
    expected: Expected,
    without: list[list[int]],
) -> dict[str, Any]:
    """A row of the table, with the simulation of the ids that vLLM should have used."""
    row: dict[str, Any] = {"configuration": configuration.name}
    if "error" in result:
        return row | {"error": result["error"]}
    measured = Counts(**result["counts"])
    ids = min(
        configuration.readings(patched=result["patched"]),
        key=lambda used: largest_gap(measured, expected[configuration.draft, used]),
    )
    simulated = expected[configuration.draft, ids]
    return row | {
        "simulated_ids": ids,
        "measured": measured,
        "simulated": simulated,
        "gap": largest_gap(measured, simulated),
        "equal_texts": _equal(result["tokens"], without),
        "seconds": result["seconds"],
    }


def line(row: dict[str, Any]) -> str:
    """The row as Markdown."""
    if "error" in row:
        return f"| {row['configuration']} | error: {last_error(row['error'])} |"
    measured, simulated = row["measured"], row["simulated"]
    shares = (f"{n / max(measured.drafts, 1):.3f}" for n in measured.accepted_per_position)
    cells = (
        row["configuration"],
        measured.drafts,
        measured.accepted,
        " ".join(shares),
        f"{simulated.drafts}, {simulated.accepted} with {row['simulated_ids']}",
        difference(measured, simulated),
        row["equal_texts"],
    )
    return f"| {' | '.join(map(str, cells))} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs vLLM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--attention", choices=("plain", "mla"))
    parser.add_argument("--models", type=Path, help="folder of trained models to use or fill")
    parser.add_argument("--prompts", type=int, default=48, help="how many requests")
    parser.add_argument("--ahead", type=int, default=4, help="tokens drafted a step")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--graphs", action="store_true", help="compile and use CUDA graphs")
    parser.add_argument("--edges", action="store_true", help="also the first and the last boundary")
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--tolerance", type=float, help="allowed difference, a share of the drafts")
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.attention = options.attention or ("mla" if on_gpu else "plain")
    if options.attention == "mla" and options.dtype == "float32":
        parser.error("vLLM has no MLA in float32")
    if options.tolerance is None:
        options.tolerance = 0.0 if options.dtype == "float32" else TOLERANCE
    folder = options.models or MODELS / f"{options.attention}-{options.dtype}"
    # vLLM takes a relative path that it does not find for a name on a model hub.
    options.models = folder.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table.

    Returns:
        1 if a run failed, a text differs, or a count is beyond the tolerance.
    """
    options = parse(arguments)
    known = CONFIGURATIONS + (EDGES if options.edges else ())
    configurations = [c for c in known if options.only in c.name]
    started = time.perf_counter()
    train(options.models, options.attention, options.device, options.dtype)
    trained = time.perf_counter()
    texts, lengths, expected = simulate(options, configurations)
    simulated = time.perf_counter()

    prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    baseline = run_vllm(options, prompts, None)
    if "error" in baseline:
        print(baseline["error"], file=sys.stderr)
        return 1
    last = options.max_tokens
    wanted = [text[length:][:last] for text, length in zip(texts, lengths, strict=True)]
    about = {
        "vllm": baseline["vllm"],
        "patched": baseline["patched"],
        "device": options.device,
        "dtype": options.dtype,
        "attention": options.attention,
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "drafted_a_step": options.ahead,
        "graphs": options.graphs,
        "baseline_texts_as_transformers": _equal(baseline["tokens"], wanted),
        "seconds_to_train": round(trained - started, 1),
        "seconds_to_simulate": round(simulated - trained, 1),
        "seconds_of_baseline": baseline["seconds"],
    }
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    print(f"\n| {' | '.join(HEADINGS)} | texts as without |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for configuration in configurations:
        result = run_vllm(options, prompts, configuration)
        rows.append(compare(configuration, result, expected, baseline["tokens"]))
        print(line(rows[-1]), flush=True)
    if options.out:
        document = json.dumps(about | {"rows": rows}, indent=1, default=Counts.to_json)
        options.out.write_text(document + "\n", encoding="utf-8")
    whole = f"{options.prompts}/{options.prompts}"
    good = [
        "error" not in row and row["gap"] <= options.tolerance and row["equal_texts"] == whole
        for row in rows
    ]
    return int(not all(good))


def _equal(texts: list[list[int]], others: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(texts, others, strict=True))}/{len(others)}"
