"""``make demo``: the main job on a real release, in a sandbox, as a person would see it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.fetch_release import IndexUnreachableError, copy_site_packages

RELEASE = "0.17.1"
STEPS = (
    ("check", 1),
    ("apply --diff", 1),
    ("apply", 0),
    ("check", 0),
    ("diff", 1),
    ("revert", 0),
    ("check", 1),
)
"""Each command with the exit code that it must end with."""


def main() -> int:
    """Run every step; 0 if each ended as it must and every file is as it was."""
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-patch-demo-") as folder:
        print(f"Fetching the Python files of vLLM {RELEASE} from the package index ...")
        try:
            site_packages = copy_site_packages(RELEASE, Path(folder) / "site-packages")
        except IndexUnreachableError as error:
            print(error, file=sys.stderr)
            return 1
        before = _contents(site_packages)
        for step, expected in STEPS:
            arguments = [*step.split(), "--site-packages", str(site_packages)]
            print(f"\n$ vllm-eagle3-patch {' '.join(arguments)}", flush=True)
            command = [sys.executable, "-m", "vllm_eagle3_patch", *arguments]
            code = subprocess.run(command, check=False).returncode
            print(f"(exit code {code})")
            if code != expected:
                print(f"this step must end with {expected}", file=sys.stderr)
                return 1
        if _contents(site_packages) != before:
            print("the sandbox is not as it was", file=sys.stderr)
            return 1
        print(f"\nAll {len(before)} files of the sandbox are byte for byte as they were.")
    return 0


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


if __name__ == "__main__":
    sys.exit(main())
