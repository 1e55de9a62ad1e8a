"""Completion, in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run
from vllm_eagle3_patch.cli.completion import PROGRAM, patch_names
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.patches._discovery import all_patches

ASK_BASH = """
eval "$(vllm-eagle3-patch completion bash)"
complete -p vllm-eagle3-patch >&2
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_vllm_eagle3_patch_completion vllm-eagle3-patch
printf '%s\\n' "${COMPREPLY[@]}"
"""

# In a pseudo terminal of its own, as zsh completes on a terminal only.
ASK_ZSH = """
zmodload zsh/zpty
zpty asked zsh -f -i
zpty -w asked 'PS1=""; autoload -U compinit; compinit -u -D; LISTMAX=0'
zpty -w asked 'eval "$(vllm-eagle3-patch completion zsh)"; echo is-$((1+1))-ready'
zpty -r -m asked REPLY '*is-2-ready*'
zpty -w -n asked "$*"$'\\t'
zpty -r -m asked REPLY "*$EXPECTED*"
print -r -- "$REPLY"
"""


def shell(name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a shell that finds this program, or skip where the machine has no such shell."""
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on this machine")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [name, *arguments],
        env={**os.environ, "PATH": path, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def in_bash(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    done = shell("bash", "--norc", "-c", ASK_BASH, "bash", PROGRAM, *words)
    assert "-F _vllm_eagle3_patch_completion vllm-eagle3-patch" in done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def in_fish(*words: str) -> list[str]:
    """What fish offers for the last of these words."""
    line = " ".join([PROGRAM, *words])
    asked = f"vllm-eagle3-patch completion fish | source; complete --do-complete '{line}'"
    done = shell("fish", "--no-config", "--command", asked)
    assert done.returncode == 0, done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def test_names_of_patches_are_known_without_importing_them() -> None:
    assert patch_names() == tuple(patch.name for patch in all_patches())


def test_bash_completes_commands() -> None:
    assert in_bash("") == [
        *("check", "verify", "apply", "revert", "diff", "matrix", "doctor", "completion")
    ]
    assert in_bash("re") == ["revert"]


def test_bash_completes_values() -> None:
    assert in_bash("apply", "--only", "dual") == ["dual-batch-overlap"]
    assert in_bash("apply", "--only", "kimi-k25", "--skip", "kimi") == ["kimi-vl"]
    assert in_bash("check", "--model", "kimi_k2") == ["kimi_k2", "kimi_k25"]
    assert in_bash("check", "--model", "kimi_k25", "--model", "Kimi") == [
        *("KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration")
    ]
    assert in_bash("matrix", "--release", "0.17") == ["0.17.0", "0.17.1"]
    assert in_bash("doctor", "--release", "") == list(matrix.names())
    assert in_bash("completion", "z") == ["zsh"]


def test_bash_completes_options() -> None:
    assert "--dry-run" in in_bash("apply", "--d")


def test_fish_completes_commands_and_values() -> None:
    assert in_fish("mat") == ["matrix"]
    assert in_fish("apply", "--only", "dual") == ["dual-batch-overlap"]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("mat", "matrix"), ("apply --only dual", "dual-batch-overlap")],
)
def test_zsh_completes_commands_and_values(typed: str, completed: str) -> None:
    done = shell("zsh", "-f", "-c", ASK_ZSH, "zsh", PROGRAM, typed, EXPECTED=completed)
    assert completed in done.stdout, done.stderr


def test_no_value_needs_libcst() -> None:
    code = (
        "import sys; from vllm_eagle3_patch.cli import completion as c\n"
        "import click\n"
        "context = click.Context(click.Command('check'))\n"
        "for complete in (c.patches_beginning, c.models_beginning, c.releases_beginning):\n"
        "    assert complete(context, click.Option(['--x']), '')\n"
        "print('libcst' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_unknown_shell_is_wrong_usage() -> None:
    ended = run("completion", "tcsh")
    assert ended.exit_code == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in ended.stderr
