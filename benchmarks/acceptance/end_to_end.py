"""Everything that only a run shows, by one command: ``python -m benchmarks.acceptance.end_to_end``.

It patches, trains, simulates, and runs every row of ``rows`` in a process of its own, several side
by side. What is found is added to ``results.jsonl`` in the folder of ``--out`` as it comes; started
again with the same folder, it goes on with what is missing. Standard library only: the interpreters
that have vLLM are named by options.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.acceptance import report
from benchmarks.acceptance.pool import Ended, Job, run_all
from benchmarks.acceptance.rows import AHEAD, MAX_TOKENS, PROMPTS, SERVED_AHEAD, Row, rows

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"generate": "speculate", "serve": "served", "states": "states", "cost": "cost"}
KEPT = ("counts", "states", "cost", "rounds", "vllm", "patched", "seconds_to_load")
"""Of a row's answer, what goes into the results."""
IN_USE = "already in use"
"""What a process says that another one beside it took the port from."""
SKIP = ("--skip", "draft-attention-backend")
LAST_LINES = 60


class Run:
    """One run of the command.

    Args:
        options: Its options.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.results = self.out / "results.jsonl"
        self.deadline = time.monotonic() + 60 * options.minutes
        self.interpreters = {
            "patched": options.python,
            "stock": options.stock,
            "skipped": options.skipped,
        }
        for folder in ("answers", "logs", "cache", "pages"):
            (self.out / folder).mkdir(parents=True, exist_ok=True)
        self.quiet = self.out / "quiet"
        self.quiet.unlink(missing_ok=True)
        self.again: set[str] = set()
        self.failed_first = False

    def lines(self) -> list[dict[str, Any]]:
        """What was found so far."""
        return report.read(self.results)

    def add(self, line: dict[str, Any]) -> None:
        """Write down what was found, at once."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def patch(self) -> bool:
        """Apply, check and verify, where asked for and not done before; whether all went well."""
        if not self.options.tool:
            return True
        done = {
            (line["tool"], line["variant"])
            for line in self.lines()
            if line.get("exit_code") == 0 and "tool" in line
        }
        asked = [("patched", name, ()) for name in ("apply", "check", "verify")]
        if self.options.skipped:
            asked.append(("skipped", "apply", SKIP))
        for variant, name, others in asked:
            if (name, variant) in done:
                continue
            command = [*shlex.split(self.options.tool), name, "--json", *others]
            command += ["--python", self.interpreters[variant]]
            if name != "verify":
                command += shlex.split(self.options.apply_options)
            started = time.monotonic()
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            self.add(
                {
                    "tool": name,
                    "variant": variant,
                    "options": [*others, *shlex.split(self.options.apply_options)],
                    "exit_code": ended.returncode,
                    "seconds": round(time.monotonic() - started, 1),
                    **report.summary(ended.stdout),
                }
            )
            print(f"{name} ({variant}): exit code {ended.returncode}", flush=True)
            if ended.returncode != 0:
                print(ended.stdout[-4000:], ended.stderr[-4000:], sep="\n", flush=True)
                return False
        return True

    def start_preparing(self) -> subprocess.Popen[bytes] | None:
        """Train and simulate, unless that was done before."""
        options = self.options
        if (options.models / "expected.json").exists():
            return None
        command = [options.python, "-m", "benchmarks.acceptance.prepare"]
        command += ["--models", str(options.models), "--device", options.device]
        command += ["--attention", options.attention, "--dtypes", ",".join(options.dtypes)]
        command += ["--prompts", str(options.prompts)]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment("prepare"))

    def expected(self) -> dict[str, Any]:
        """What the simulation found."""
        text = (self.options.models / "expected.json").read_text(encoding="utf-8")
        document: dict[str, Any] = json.loads(text)
        return document

    def environment(self, name: str) -> dict[str, str]:
        """What each process is started with: caches of its own, and this checkout."""
        cache = self.out / "cache" / name
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys_path(os.environ)]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(cache),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        found.setdefault("VLLM_LOGGING_LEVEL", "INFO")
        found.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if self.options.attention == "plain":
            found["VLLM_MLA_DISABLE"] = "1"
        if self.options.device == "cpu":
            found.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        else:
            cores = os.cpu_count() or 1
            found.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.options.jobs)))
        return found

    def jobs(self, expected: dict[str, Any]) -> list[Job]:
        """The rows that are wanted, can be run here and have not been."""
        prompts = self.out / "prompts.json"
        prompts.write_text(json.dumps(expected["prompts"]), encoding="utf-8")
        done = self.done(expected)
        found, left = [], []
        for row in rows(cuda=self.options.device == "cuda"):
            if row.name in done or not chosen(row.name, self.options.rows):
                continue
            needed = ("stock", "patched") if row.kind == "cost" else (row.variant,)
            if not all(self.interpreters[one] for one in needed) or row.gpus > max(
                1, expected["gpus"]
            ):
                left.append(row.name)
                continue
            found.append(self.job(row, prompts, len(found) % max(1, expected["gpus"])))
        if left:
            print(f"cannot be run here: {'; '.join(left)}", flush=True)
        return found

    def done(self, expected: dict[str, Any]) -> set[str]:
        """The rows that went well, with these models."""
        found: set[str] = set()
        same = True
        for line in self.lines():
            if "about" in line:
                same = line["about"]["counts"] == expected["counts"]
            elif line.get("good") and same:
                found.add(line["row"])
        return found

    def job(self, row: Row, prompts: Path, gpu: int) -> Job:
        """The process of a row."""
        options = self.options
        python = self.interpreters["patched" if row.kind == "cost" else row.variant]
        ahead = SERVED_AHEAD if row.kind == "serve" else AHEAD
        answer = self.out / "answers" / f"{row.slug}.json"
        answer.unlink(missing_ok=True)
        command = [python, "-m", f"benchmarks.acceptance.{MODULES[row.kind]}"]
        if row.kind == "cost":
            command += ["--stock", options.stock, "--patched", options.python]
            command += ["--quiet", str(self.quiet)]
        command += ["--target", str(options.models / "target"), "--prompts", str(prompts)]
        command += ["--out", str(answer), "--device", options.device]
        command += ["--dtype", row.dtype or options.dtypes[0]]
        command += ["--ahead", str(ahead), "--max-tokens", str(MAX_TOKENS)]
        command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
        if row.draft:
            command += ["--draft", str(options.models / row.draft), "--place", row.place]
            command += ["--ids", ",".join(map(str, row.ids))]
        if row.mode != "eager":
            command.append(f"--{row.mode}")
        engine = options.engine | row.engine
        if engine:
            command += ["--engine", json.dumps(engine)]
        environment = self.environment(row.slug)
        if options.device == "cuda" and row.gpus == 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        log = self.out / "logs" / f"{row.slug}.txt"
        seconds = options.seconds * (2 if row.kind == "cost" else 1)
        return Job(row.name, command, environment, log, seconds, last=row.kind == "cost")

    def ended(self, done: Ended) -> bool:
        """Write down how a row ended; whether to go on."""
        row = next(r for r in rows(cuda=True) if r.name == done.job.name)
        output = done.job.log.read_text(encoding="utf-8", errors="replace")
        line: dict[str, Any] = {"row": row.name, "seconds": done.seconds}
        answer_file = self.out / "answers" / f"{row.slug}.json"
        if done.code is None:
            line["problem"] = f"ended after {done.seconds:.0f} seconds"
        elif done.code != 0:
            line["problem"] = report.last_error(output)
        elif row.error:
            line["problem"] = "ran, and must not have"
        else:
            answer = json.loads(answer_file.read_text(encoding="utf-8"))
            line |= {name: answer[name] for name in KEPT if name in answer}
            if "tokens" in answer:
                line["texts"] = [digest(tokens) for tokens in answer["tokens"]]
            if "page" in answer:
                page = self.out / "pages" / f"{row.slug}.txt"
                page.write_text(answer["page"], encoding="utf-8")
        if row.error and done.code not in (0, None):
            said = report.sentence(output, row.error)
            if said:
                line["said"] = said
                del line["problem"]
        line["good"] = "problem" not in line
        self.add(line)
        shown = line.get("said") or line.get("problem") or _short(line)
        print(f"{done.seconds:6.1f} s  {row.name}: {shown}", flush=True)
        if not line["good"]:
            print("\n".join(output.splitlines()[-LAST_LINES:]), flush=True)
            if IN_USE in output:
                self.again.add(row.name)
            if self.options.stop_at_first and not self.failed_first:
                self.failed_first = True
                return False
        return True

    def judge_pages(self) -> None:
        """What ``doctor --metrics`` says of each page."""
        if not self.options.tool:
            return
        told = {line["doctor"] for line in self.lines() if "doctor" in line}
        for page in sorted((self.out / "pages").glob("*.txt")):
            if page.stem in told:
                continue
            command = [*shlex.split(self.options.tool), "doctor", "--metrics", page.name]
            ended = subprocess.run(
                command,
                cwd=page.parent,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100"},
            )
            self.add({"doctor": page.stem, "exit_code": ended.returncode, "text": ended.stdout})

    def all_rows(self) -> int:
        """Do everything.

        Returns:
            1 if anything is not as it must be.
        """
        preparing = self.start_preparing()
        patched = self.patch()
        if preparing is not None and preparing.wait() != 0:
            print("the models could not be trained or simulated", file=sys.stderr)
            return 1
        if not patched:
            return 1
        expected = self.expected()
        about = {name: value for name, value in expected.items() if name != "prompts"}
        about["texts"] = {
            dtype: [digest(tokens) for tokens in texts]
            for dtype, texts in expected["texts"].items()
        }
        about |= {"dtype": self.options.dtypes[0], "prompts": len(expected["prompts"])}
        self.add({"about": about})
        jobs = self.jobs(expected)
        left = self.work(jobs)
        if self.again:
            left += self.work([job for job in jobs if job.name in self.again])
        self.judge_pages()
        for job in left:
            print(f"not run to its end: {job.name}", flush=True)
        text, good = report.markdown(self.lines())
        print(text, flush=True)
        return int(not good or bool(left))

    def work(self, jobs: list[Job]) -> list[Job]:
        """Run jobs; what is left."""
        return run_all(jobs, self.options.jobs, self.deadline, self.ended, self.quiet.touch)


def sys_path(environment: os._Environ[str]) -> list[str]:
    """The folders that ``PYTHONPATH`` names."""
    return [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]


def chosen(name: str, asked: str) -> bool:
    """Whether a row's name holds one of the texts, or is one that follows a ``=``."""
    return any(
        text[1:] == name if text.startswith("=") else text in name for text in asked.split("|")
    )


def digest(tokens: Sequence[int]) -> str:
    """A text's, short: equal texts have equal ones."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def _short(line: dict[str, Any]) -> str:
    shown = {name: line[name] for name in ("counts", "states", "cost") if name in line}
    return json.dumps(shown) if shown else "ran"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acceptance.end_to_end", description=__doc__
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--python", required=True, help="interpreter whose vLLM is patched")
    parser.add_argument("--stock", default="", help="one whose vLLM is as published")
    parser.add_argument(
        "--skipped", default="", help="one to patch without draft-attention-backend"
    )
    parser.add_argument(
        "--tool", default="", help="our command line; without it nothing is patched"
    )
    parser.add_argument("--apply-options", default="", help="further options of apply and check")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--models", type=Path, help="folder of trained models to use or fill")
    parser.add_argument("--attention", choices=("plain", "mla"))
    parser.add_argument("--dtypes", help="the first is what the models are saved in")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--rows", default="", help="only rows whose name holds a or is b: a|=b")
    parser.add_argument("--minutes", type=float, default=60, help="for all rows together")
    parser.add_argument("--seconds", type=float, default=300, help="for one row")
    parser.add_argument("--jobs", type=int, help="how many rows side by side")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.04)
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="further arguments of LLM, as JSON"
    )
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first bad row")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    options.attention = options.attention or ("mla" if cuda else "plain")
    options.dtypes = (options.dtypes or ("bfloat16,float16" if cuda else "float32")).split(",")
    options.jobs = options.jobs or (12 if cuda else 1)
    options.out = options.out.resolve()
    models = options.models or ROOT / "build" / "acceptance" / f"end-to-end-{options.attention}"
    options.models = models.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and print the table."""
    return Run(parse(arguments)).all_rows()


if __name__ == "__main__":
    raise SystemExit(main())
