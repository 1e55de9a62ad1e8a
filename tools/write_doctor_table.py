"""Write the table of public reports against rules into ``docs/doctor.md``.

Run as ``python -m tools.write_doctor_table``. What a rule covers it says itself; here stand the
reports' names, and why a static check cannot see the rest.
"""

from __future__ import annotations

from pathlib import Path

from vllm_eagle3_patch.doctor.finding import all_rules

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
MARKER = "<!-- Written by `python -m tools.write_doctor_table`; do not edit below. -->\n"

GROUPS = {
    "A. Does not start: the target model": {
        1: "Kimi-K2 is not on vLLM's list",
        2: "Same list, other families",
        3: "Two gates must both open",
        4: "The interface is missing though the list passes",
        5: "A multimodal model does not hand the calls on",
        6: "`image_token_index` on a multimodal target",
        7: "The draft model's class refuses multimodal targets",
    },
    "B. Does not start: the draft model's config or weights": {
        8: "Its architecture is not in the registry",
        9: "An MLA draft model is not known; type `deepseek_v3`",
        10: "An MLA draft model in another engine",
        11: "`auto_map` names a file that is not there",
        12: "Another width than the target's, an embedding of its own",
        13: "Not three aux hidden states",
        14: "Fewer states captured than `fc` takes",
        15: "MLA with a plain rotary embedding",
        16: "The draft model's vocabulary",
        17: "The draft model cannot be found",
        18: "The draft model's type differs",
    },
    "C. Does not start, or hangs: attention, KV cache, parallelism": {
        19: "An MLA backend reaches the draft model",
        20: "The same in another engine",
        21: "Decode context parallelism reaches the draft model",
        22: "The same with an MLA draft model",
        23: "KV pages of target and draft model",
        24: "Disaggregated prefill",
        25: "Pipeline parallelism drops aux hidden states",
        26: "`draft_tensor_parallel_size` has no effect",
        27: "Hangs with data parallelism",
        28: "An FP8 KV cache",
    },
    "D. Accepts badly: which layers feed the draft model": {
        29: "One key, two meanings",
        30: "Off by one that costs much more",
        31: "No ids: a silent guess",
        32: "Boundaries up to the last, and a norm ignored",
        33: "An engine that never reads the ids",
        34: "Ids nested under `eagle_config`",
        35: "The last layer's output cannot be captured",
        36: "The trainer collected one layer off",
    },
    "E. Accepts badly: structure, weights, environment": {
        37: "A random embedding in the checkpoint",
        38: "No `lm_head` beside `draft_vocab_size`",
        39: "Its own `lm_head` is overwritten",
        40: "Ranks disagree on sharing",
        41: "EAGLE for an EAGLE-3 head",
        42: "Norm flags that the class does not read",
        43: "`use_aux_hidden_state: false` ignored",
        44: "Same weights, another config",
        45: "Another rotary embedding than in training",
        46: "Past the draft model's context window",
        47: "A target rotated by its quantization",
        48: "Prefill elsewhere, expert or data parallelism",
        49: "A crash in rejection sampling with Kimi",
        50: "Acceptance depends on the task",
        51: "Acceptance between versions; what the figures mean",
    },
    "Beyond the reports' groups": {
        58: "The compile cache",
    },
}

UNSEEN = {
    20: "the rule is about vLLM; SGLang has an option of its own",
    36: "nothing in a config shows it; `doctor --metrics`: position 0 below 0.2, or a length below "
    "the published figures, with every other cause excluded",
    37: "a header has no values, so equal or random stays open; `doctor --metrics`: position 0 "
    "below 0.2",
    40: "it shows in the log of each rank only; `doctor --metrics`: one engine far below the "
    "others",
    44: "which keys differed is not public; missing keys are named",
    45: "what it was trained with is in no config; both are printed, and layouts that cannot be "
    "read are found",
    48: "the warnings name the combinations; `doctor --metrics`: a length clearly below a run "
    "without them",
    49: "TensorRT-LLM's code, not the config; an error and not a low acceptance, so `doctor "
    "--metrics` has no part in it",
    50: "a task is not in a config; `doctor --metrics` says it with every verdict: never judge by "
    "random prompts, name k, task and template",
    51: "a change of the engine's behaviour is in no config; `doctor --metrics` gives length as "
    "1 + accepted / drafts, of the interval between two scrapes",
}
"""Why a static check does not see a report, or not all of it, and what the metrics reader says."""

NO_REPORT = {
    "dual-batch-overlap": "Dual batch overlap (read in the source)",
    "float16-scaling": "float16 scales the residual stream (read in the source)",
    "tensor-parallel": "One rank's part of a state (read in the source)",
}


def table() -> str:
    """The table, in Markdown."""
    covered: dict[int, list[str]] = {}
    for rule in all_rules():
        for number in rule.reports:
            covered.setdefault(number, []).extend(rule.codes)
    lines = []
    for group, entries in GROUPS.items():
        lines += [f"### {group}", "", "| report | about | covered by |", "| --- | --- | --- |"]
        for number, title in entries.items():
            names = ", ".join(f"`{code}`" for code in dict.fromkeys(covered.get(number, [])))
            unseen = UNSEEN.get(number)
            left = unseen and f"{'not wholly' if names else 'not seen'}: {unseen}"
            parts = [part for part in (names, left) if part]
            assert parts, f"report {number} is neither covered nor explained"
            lines.append(f"| {number} | {title} | {'; '.join(parts)} |")
        if group == list(GROUPS)[-1]:
            lines += [f"| - | {title} | `{code}` |" for code, title in NO_REPORT.items()]
        lines.append("")
    lines += ["### Every finding", "", "| finding | what it means |", "| --- | --- |"]
    rows = {code: rule.summary for rule in all_rules() for code in rule.codes}
    lines += [f"| `{code}` | {summary} |" for code, summary in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def document(current: str) -> str:
    """The document with the table as it should be; what stands before the marker is kept."""
    before, marker, _ = current.partition(MARKER)
    assert marker, f"{DOCUMENT} has no marker"
    return f"{before}{marker}\n{table()}"


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(DOCUMENT)


if __name__ == "__main__":
    main()
