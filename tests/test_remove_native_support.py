"""The reverse transform of the runtime tests, on small look-alikes of vLLM's own support."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from runtime.remove_native_support import DEEPSEEK, INTERFACES, UnexpectedError, remove
from vllm_eagle3_patch.ground.errors import AnchorNotFoundError
from vllm_eagle3_patch.installation.distribution import read_record
from vllm_eagle3_patch.patches.deepseek_v2 import DeepseekV2
from vllm_eagle3_patch.vllm_source.sources import parse

PROTOCOLS = """\
class Base:
    pass


class SupportsEagle(Base):
    pass


class SupportsEagle3(Base):
    pass
"""

BEFORE = """\
from itertools import islice

from torch import nn

from .interfaces import (
    SupportsEagle,
    SupportsEagle3,
    SupportsPP,
)


class DeepseekV2Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = config.layers

        self.aux_hidden_state_layers = tuple[int, ...]()

        # what follows
        self.norm = config.norm

    def forward(self, positions, hidden_states):
        residual = None

        aux_hidden_states = []
        for idx, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer),
            start=self.start_layer,
        ):
            # before the layer
            if hidden_states.shape[0] != positions.shape[0]:
                hidden_states = gather(hidden_states)
            if idx in self.aux_hidden_state_layers:
                state = hidden_states + residual
                aux_hidden_states.append(state)
            hidden_states, residual = layer(positions, hidden_states, residual)

        # after the layers
        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states + residual)

        hidden_states, _ = self.norm(hidden_states, residual)
        if len(aux_hidden_states) > 0:
            return hidden_states, aux_hidden_states
        return hidden_states


class DeepseekV2ForCausalLM(
    nn.Module,
    SupportsPP,
    SupportsEagle,
    SupportsEagle3,
):
    def __init__(self, config):
        self.model = DeepseekV2Model(config)

    def set_aux_hidden_state_layers(self, layers):
        self.model.aux_hidden_state_layers = layers

    def get_eagle3_aux_hidden_state_layers(self):
        return (2, len(self.model.layers) // 2, len(self.model.layers) - 3)

    def forward(self, positions, hidden_states):
        return self.model(positions, hidden_states)
"""

AFTER = """\
from itertools import islice

from torch import nn

from .interfaces import (
    SupportsEagle,
    SupportsPP,
)


class DeepseekV2Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = config.layers

        # what follows
        self.norm = config.norm

    def forward(self, positions, hidden_states):
        residual = None

        for layer in islice(self.layers, self.start_layer, self.end_layer):
            # before the layer
            if hidden_states.shape[0] != positions.shape[0]:
                hidden_states = gather(hidden_states)
            hidden_states, residual = layer(positions, hidden_states, residual)

        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class DeepseekV2ForCausalLM(
    nn.Module,
    SupportsPP,
    SupportsEagle,
):
    def __init__(self, config):
        self.model = DeepseekV2Model(config)

    def forward(self, positions, hidden_states):
        return self.model(positions, hidden_states)
"""

LAST = """\
        # after the layers
        if self.end_layer in self.aux_hidden_state_layers:
            aux_hidden_states.append(hidden_states + residual)

"""
RECORD = "vllm-1.dist-info/RECORD"


def install(folder: Path, source: str = BEFORE, protocols: str = PROTOCOLS) -> Path:
    """A folder that holds the two files and a RECORD with Windows' line endings."""
    root = folder / "site-packages"
    (root / DEEPSEEK).parent.mkdir(parents=True)
    (root / DEEPSEEK).write_text(source)
    (root / INTERFACES).write_text(protocols)
    (root / RECORD).parent.mkdir()
    (root / RECORD).write_bytes(
        b"vllm/a.py,sha256=abc,1\r\n" + row(source) + b"\r\nvllm/b.py,sha256=def,2\r\n"
    )
    return root


def row(source: str) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(source.encode()).digest())
    return f"{DEEPSEEK},sha256={digest.decode().rstrip('=')},{len(source)}".encode()


@pytest.mark.parametrize("source", [BEFORE, BEFORE.replace(LAST, "")], ids=["newer", "older"])
def test_the_file_is_as_before_the_support(tmp_path: Path, source: str) -> None:
    root = install(tmp_path, source)
    remove(root)
    assert (root / DEEPSEEK).read_text() == AFTER


IMPORT = "(\n    SupportsEagle,\n    SupportsEagle3,\n    SupportsPP,\n)"
BASES = "(\n    nn.Module,\n    SupportsPP,\n    SupportsEagle,\n    SupportsEagle3,\n)"


def test_names_and_bases_on_one_line(tmp_path: Path) -> None:
    source = BEFORE.replace(IMPORT, "SupportsEagle, SupportsEagle3, SupportsPP")
    root = install(tmp_path, source.replace(BASES, "(nn.Module, SupportsPP, SupportsEagle3)"))
    remove(root)
    after = (root / DEEPSEEK).read_text()
    assert "from .interfaces import SupportsEagle, SupportsPP\n" in after
    assert "class DeepseekV2ForCausalLM(nn.Module, SupportsPP):\n" in after


def test_our_patch_can_be_put_in(tmp_path: Path) -> None:
    root = install(tmp_path)
    remove(root)
    patch = DeepseekV2()
    before = (root / DEEPSEEK).read_bytes()
    assert not patch.holds(parse(before, DEEPSEEK))
    assert patch.holds(parse(patch.apply(before, DEEPSEEK), DEEPSEEK))


def test_the_file_counts_as_installed_so(tmp_path: Path) -> None:
    root = install(tmp_path)
    remove(root)
    before, ours, after = (root / RECORD).read_bytes().split(b"\r\n")[:3]
    assert (before, after) == (b"vllm/a.py,sha256=abc,1", b"vllm/b.py,sha256=def,2")
    assert ours == row(AFTER)
    recorded = read_record((root / RECORD).parent, root)[DEEPSEEK]
    assert recorded == hashlib.sha256(AFTER.encode()).hexdigest()


@pytest.mark.parametrize("path", [DEEPSEEK, RECORD])
def test_an_installers_cache_is_left_alone(tmp_path: Path, path: str) -> None:
    root = install(tmp_path)
    (root / path).chmod(0o640)
    cached = tmp_path / "cached"
    cached.hardlink_to(root / path)
    content = cached.read_bytes()
    remove(root)
    assert cached.read_bytes() == content != (root / path).read_bytes()
    assert (root / path).stat().st_mode & 0o777 == 0o640
    assert not list(root.rglob("*.new"))


UNEXPECTED = {
    "no support": (AFTER, PROTOCOLS),
    "a method is missing": (BEFORE.replace("get_eagle3_aux", "get_eagle3_default_aux"), PROTOCOLS),
    "another loop": (BEFORE.replace("start=self.start_layer", "start=0"), PROTOCOLS),
    "the number has another use": (BEFORE.replace("(positions, hid", "(idx, hid"), PROTOCOLS),
    "states have another use": (
        BEFORE.replace("_ = self.norm(hidden_states,", "_ = self.norm(aux_hidden_states,"),
        PROTOCOLS,
    ),
    "another return": (BEFORE.replace("return hidden_states, aux", "return aux"), PROTOCOLS),
    "a condition with an alternative": (
        BEFORE.replace(LAST, LAST.rstrip() + "\n        else:\n            pass\n\n"),
        PROTOCOLS,
    ),
    "no protocol": (BEFORE, PROTOCOLS.replace("SupportsEagle3", "SupportsOther")),
    "another base implies it": (
        BEFORE,
        PROTOCOLS.replace("SupportsEagle(Base)", "SupportsEagle(abc.SupportsEagle3)"),
    ),
}


@pytest.mark.parametrize(("source", "protocols"), UNEXPECTED.values(), ids=UNEXPECTED)
def test_anything_else_is_an_error(tmp_path: Path, source: str, protocols: str) -> None:
    root = install(tmp_path, source, protocols)
    with pytest.raises((UnexpectedError, AnchorNotFoundError)):
        remove(root)
    assert (root / DEEPSEEK).read_text() == source
    assert row(source) in (root / RECORD).read_bytes()


def test_a_file_edited_by_hand_is_an_error(tmp_path: Path) -> None:
    root = install(tmp_path)
    (root / DEEPSEEK).write_text(f"{BEFORE}\n")
    with pytest.raises(UnexpectedError, match="not as it was installed"):
        remove(root)


def test_without_a_row_in_record_is_an_error(tmp_path: Path) -> None:
    root = install(tmp_path)
    (root / RECORD).write_bytes(b"vllm/a.py,sha256=abc,1\r\n")
    with pytest.raises(UnexpectedError, match="0 rows"):
        remove(root)
