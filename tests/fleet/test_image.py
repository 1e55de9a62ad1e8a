"""The documented ``RUN`` line, on layers as an image build has them: overlayfs and a chroot.

The lower layer is this machine's system, with a vLLM in the dist-packages of its own Python, which
is where vLLM's image has it. What the line writes is the upper layer, by which the image grows.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from conftest import small_copy
from fleet.conftest import PROJECT
from fleet.sshd import NeededError

STATE = ".vllm-eagle3-patch"
MOUNT = re.compile(r"--mount=(\S+)\s*")
TIMEOUT = 300.0


def run_line() -> str:
    """The one ``RUN`` line of docs/fleet.md."""
    text = (PROJECT / "docs/fleet.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^RUN ((?:.|\\\n)*)$", text, re.MULTILINE)
    return str(line.replace("\\\n", " "))


def dist_packages() -> Path:
    """Where the system's Python imports from without a venv, as vLLM's image has it."""
    code = "import sys; print(*[p for p in sys.path if p.startswith('/usr/local/lib/python3')])"
    command = ["/usr/bin/python3", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    paths = ended.stdout.split()
    if not paths or not paths[0].endswith("dist-packages"):
        raise NeededError(f"the system's python3 has no dist-packages: {ended}")
    return Path(paths[0])


class Image:
    """Layers: the system, a vLLM over it, and what is written over both.

    Args:
        folder: Where the layers are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.site_packages = dist_packages()
        self.lower = folder / "lower"
        small_copy("0.17.1", self.lower / self.site_packages.relative_to("/"))

    def layer(self, name: str) -> Path:
        """What a line wrote; in memory while it is used, as no layer may lie in another."""
        return self._folder / "saved" / name

    def run(
        self, line: str, name: str, *below: str, **files: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a ``RUN`` line, on the layers below, and keep what it writes as a layer.

        Args:
            line: Without the word RUN.
            name: The new layer's.
            below: The names of earlier layers, the newest first.
            files: What a bind mount's source stands for, by its ending.
        """
        mounts = []
        for options in MOUNT.findall(line):
            given = dict(item.split("=", 1) for item in options.split(","))
            target = f"$merged{given['target']}"
            if given["type"] == "bind":
                source = files[given["source"].rpartition(".")[2]]
                mounts.append(
                    f'touch "{target}"; mount --bind {shlex.quote(str(source))} "{target}"'
                )
            else:
                assert given["type"] == "tmpfs"
                mounts.append(f'mkdir -p "{target}"; mount -t tmpfs tmpfs "{target}"')
        layers = [*(self.layer(it) for it in below), self.lower]
        copies = "; ".join(
            f"cp -a {shlex.quote(str(layer))} $memory/{number}"
            for number, layer in enumerate(layers)
        )
        lower = "".join(f"$memory/{number}:" for number in range(len(layers)))
        saved = self.layer(name)
        saved.mkdir(parents=True)
        script = f"""
            set -e
            memory={shlex.quote(str(self._folder))}/memory
            mkdir -p $memory
            mount -t tmpfs tmpfs $memory
            mkdir $memory/upper $memory/work $memory/merged
            {copies}
            merged=$memory/merged
            writable=upperdir=$memory/upper,workdir=$memory/work
            mount -t overlay overlay -o lowerdir={lower}/,$writable $merged
            mount -t proc proc $merged/proc
            mount --rbind /dev $merged/dev
            mount -t tmpfs tmpfs $merged/mnt
            {"; ".join(mounts)}
            code=0
            chroot $merged /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root \
                /bin/sh -c {shlex.quote(MOUNT.sub("", line))} || code=$?
            cp -a $memory/upper/. {shlex.quote(str(saved))}
            exit $code
        """
        return subprocess.run(
            [
                *("unshare", "--mount", "--propagation=private", "--net", "--pid", "--fork"),
                *("--kill-child=KILL", "sh", "-c", script),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    def written(self, name: str) -> set[str]:
        """The files of a layer, from dist-packages where they are in it."""
        layer = self.layer(name)
        inside = layer / self.site_packages.relative_to("/")
        files = [path for path in layer.rglob("*") if path.is_symlink() or not path.is_dir()]
        return {
            str(path.relative_to(inside if path.is_relative_to(inside) else layer))
            for path in files
        }


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_the_run_line_writes_the_patch_and_its_originals_only(image: Image, program: Path) -> None:
    ended = image.run(run_line(), "patched", pyz=program)
    assert ended.returncode == 0, ended.stderr
    assert f"vllm 0.17.1 in {image.site_packages}/vllm\n" in ended.stdout
    changed = set(re.findall(r"^changed: (.*)$", ended.stdout, re.MULTILINE))
    assert len(changed) > 5
    written = image.written("patched")
    assert {path for path in written if not path.startswith(STATE)} == changed
    assert any(path.startswith(STATE) for path in written)

    checked = image.run("python3 /mnt/p check", "checked", "patched", pyz=program)
    assert checked.returncode == 2  # There is no program in the image.
    mounts = "--mount=type=bind,source=p.pyz,target=/mnt/p --mount=type=tmpfs,target=/mnt/x "
    checked = image.run(
        f"{mounts} PEX_ROOT=/mnt/x python3 /mnt/p check", "checked-again", "patched", pyz=program
    )
    assert checked.returncode == 0, checked.stderr
    assert image.written("checked-again") == set()


def test_a_later_layer_reverts(image: Image, program: Path) -> None:
    assert image.run(run_line(), "patched", pyz=program).returncode == 0
    line = run_line().replace(" apply ", " revert ")
    ended = image.run(line, "reverted", "patched", pyz=program)
    assert ended.returncode == 0, ended.stderr
    inside = image.site_packages.relative_to("/")
    changed = re.findall(r"^changed: (.*)$", ended.stdout, re.MULTILINE)
    assert len(changed) > 5
    for path in changed:
        original = (image.lower / inside / path).read_bytes()
        assert (image.layer("reverted") / inside / path).read_bytes() == original


def test_the_originals_can_be_left_out(image: Image, program: Path) -> None:
    line = f"{run_line()} && rm -r {image.site_packages}/{STATE}"
    assert image.run(line, "patched", pyz=program).returncode == 0
    assert not any(path.startswith(STATE) for path in image.written("patched"))
    line = run_line().replace(" apply ", " check ")
    ended = image.run(line, "checked", "patched", pyz=program)
    assert ended.returncode == 0, ended.stdout


def test_an_image_that_cannot_be_patched_ends_the_build(image: Image, program: Path) -> None:
    (image.lower / image.site_packages.relative_to("/") / "vllm/config/speculative.py").write_text(
        ""
    )
    ended = image.run(run_line(), "patched", pyz=program)
    assert ended.returncode == 5
    assert image.written("patched") == set()
