"""The same through ``vllm serve``: greedy tokens over HTTP, and a scrape of ``/metrics``.

Run as ``python -m benchmarks.acceptance.served``, with the options of ``speculate`` and an
interpreter that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.acceptance import speculate
from benchmarks.acceptance.counting import Counts

LOAD = 400.0
"""Seconds until a server answers, at most."""
PREFIX = "vllm:spec_decode_num_"


def words(arguments: Mapping[str, Any]) -> list[str]:
    """The command-line options of ``vllm serve`` for arguments of ``LLM``."""
    found = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None or value == {}:
            continue
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, dict):
            found += [f"--{option}", json.dumps(value)]
        else:
            found += [f"--{option}", str(value)]
    return found


def read_page(page: str) -> Counts:
    """The counters of speculation on a page of metrics."""
    values: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in page.splitlines():
        if not line.startswith(PREFIX):
            continue
        name, _, rest = line.removeprefix(PREFIX).partition("{")
        labels, _, value = rest.rpartition("} ")
        if name == "accepted_tokens_per_pos_total":
            position = labels.partition('position="')[2].partition('"')[0]
            positions[int(position)] = int(float(value))
        elif name.endswith("_total"):
            values[name.removesuffix("_total")] = int(float(value))
    return Counts(
        drafts=values.get("drafts", 0),
        draft_tokens=values.get("draft_tokens", 0),
        accepted=values.get("accepted_tokens", 0),
        accepted_per_position=[positions[position] for position in sorted(positions)],
    )


def serve(options: argparse.Namespace, draft: Path | None) -> dict[str, Any]:
    """Start a server, ask it, scrape it, end it."""
    prompts: list[list[int]] = json.loads(options.prompts.read_text(encoding="utf-8"))
    arguments = speculate.engine(options, draft, len(prompts))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    # With engine's process of its own, as servers have it.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen([*command, *words(arguments)], env=environment)
    address = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    try:
        while not _healthy(address):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            if time.perf_counter() - started > LOAD:
                raise SystemExit(f"the server did not answer within {LOAD:.0f} seconds")
            time.sleep(0.5)
        loaded = time.perf_counter()
        request = {
            "model": "target",
            "prompt": prompts,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = json.loads(_ask(f"{address}/v1/completions", request))["choices"]
        page = _ask(f"{address}/metrics")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    ordered = sorted(choices, key=lambda choice: int(choice["index"]))
    return {
        "tokens": [choice["token_ids"] for choice in ordered],
        "counts": read_page(page).to_json(),
        "page": page,
        "seconds_to_load": round(loaded - started, 1),
    }


def _healthy(address: str) -> bool:
    try:
        _ask(f"{address}/health")
    except (OSError, urllib.error.URLError):
        return False
    return True


def _ask(address: str, content: Mapping[str, Any] | None = None) -> str:
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(  # noqa: S310
        address, data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


if __name__ == "__main__":
    speculate.run(None, serve)
