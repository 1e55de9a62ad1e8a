"""Look-alikes of what ``aux-layer-ids`` changes, in each shape that vLLM's releases have."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from patch_checks import changed

from vllm_eagle3_patch.ground.family import FAMILY
from vllm_eagle3_patch.patches._layer_ids import CONFIG_METHOD
from vllm_eagle3_patch.patches.aux_layer_ids import AuxLayerIds
from vllm_eagle3_patch.vllm_source.paths import NEWER_LAYER_IDS as NEWER_RUNNER_PATH
from vllm_eagle3_patch.vllm_source.paths import RUNNER as RUNNER_PATH

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence

    from vllm_eagle3_patch.codemod.anchored import AnchoredCodemod
    from vllm_eagle3_patch.ground.family import FamilyModel

MARKER = "# vllm-eagle3-patch: aux-layer-ids\n"
INSERTED = f"    {MARKER}{textwrap.indent(CONFIG_METHOD.strip(), '    ')}\n\n"

# As in vLLM 0.8.5 to 0.16.0: no ids in the key.
CONFIG = '''"""A speculative config look-alike."""

import hashlib
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)


@config
@dataclass
class SpeculativeConfig:
    """Speculative decoding."""

    method: str = "eagle3"
    """How."""

    def compute_hash(self) -> str:
        """What the graph depends on."""
        factors: list[Any] = []
        factors.append(self.method == "eagle3")
        hash_str = hashlib.md5(str(factors).encode(),
                               usedforsecurity=False).hexdigest()
        return hash_str

    def __repr__(self) -> str:
        return f"SpeculativeConfig({self.method})"


class OtherConfig:
    def compute_hash(self) -> str:
        return str(factors)
'''
HASH = "        hash_str = hashlib.md5("
CONFIG_HASHED = f"""        {MARKER}        layer_ids = self.eagle3_aux_hidden_state_layers()
        if layer_ids is not None:
            factors.append(layer_ids)
"""

# As in vLLM 0.17.0 and later: the ids of the top level are in the key.
LATER_FACTORS = """        uses_aux_hidden_states = self.method in ("eagle3", "extract_hidden_states")
        factors.append(uses_aux_hidden_states)

        # The specific layers used also affect the computation graph
        if uses_aux_hidden_states and self.draft_model_config is not None:
            layer_ids = getattr(
                self.draft_model_config.hf_config,
                "eagle_aux_hidden_state_layer_ids",
                None,
            )
            if layer_ids is not None:
                factors.append(tuple(layer_ids))

"""
FACTORS = '        factors.append(self.method == "eagle3")\n'
LATER_READ = """                None,
            )
"""
LATER_HASHED = f"""            {MARKER}            if self.method == "eagle3":
                layer_ids = self.eagle3_aux_hidden_state_layers()
"""

# As in vLLM 0.11.1 to 0.19.1.
RUNNER = '''"""A model runner look-alike."""


class GPUModelRunner:
    def load_model(self):
        if self.use_aux_hidden_state_outputs:
            aux_layers = self._get_eagle3_aux_layers_from_config()
            if not aux_layers:
                aux_layers = self.model.get_eagle3_aux_hidden_state_layers()
            self.model.set_aux_hidden_state_layers(aux_layers)

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """The layer ids of the draft model's config."""
        if not (self.speculative_config and self.speculative_config.draft_model_config):
            return None

        hf_config = self.speculative_config.draft_model_config.hf_config
        layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
        return tuple(layer_ids) if layer_ids else None

    def execute_model(self):
        pass
'''
RUNNER_GUARD = "        if not (self.speculative_config and"
RUNNER_ASKS = f"""        {MARKER}\
        if self.speculative_config and self.speculative_config.method == "eagle3":
            return self.speculative_config.eagle3_aux_hidden_state_layers()
"""

# As in vLLM 0.10.1 to 0.11.0; up to 0.10.0 the protocol is not asked for.
OLD_RUNNER = '''"""A model runner look-alike."""


class Other:
    pass


class GPUModelRunner:
    def load_model(self):
        self.model = get_model()
        if self.use_aux_hidden_state_outputs:
            if supports_eagle3(self.model):
                self.model.set_aux_hidden_state_layers(
                    self.model.get_eagle3_aux_hidden_state_layers())
            else:
                raise RuntimeError("no")
        self.loaded = True
'''
OLD_SETS = "                self.model.set_aux_hidden_state_layers(\n"
OLD_ASKS = (
    f"                {MARKER}"
    "                aux_layers = self.speculative_config.eagle3_aux_hidden_state_layers()\n"
)
OLD_DEFAULT = "self.model.get_eagle3_aux_hidden_state_layers())"

# As in vLLM 0.17.0 and later, under vllm/v1/worker/gpu.
NEWER_RUNNER = '''"""A look-alike of what the newer model runner calls."""


def set_eagle3_aux_hidden_state_layers(model, spec_config):
    aux_layers = get_eagle3_aux_layers_from_config(spec_config)
    model.set_aux_hidden_state_layers(aux_layers or model.default())


def get_eagle3_aux_layers_from_config(
    spec_config: SpeculativeConfig,
) -> tuple[int, ...] | None:
    if not (spec_config and spec_config.draft_model_config):
        return None
    hf_config = spec_config.draft_model_config.hf_config
    layer_ids = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    if not layer_ids:
        dflash_config = getattr(hf_config, "dflash_config", None) or {}
        layer_ids = [i + 1 for i in dflash_config.get("target_layer_ids", [])]
    return tuple(layer_ids) if layer_ids else None
'''
NEWER_GUARD = "    if not (spec_config and"
NEWER_ASKS = f"""    {MARKER}    if spec_config and spec_config.method == "eagle3":
        return spec_config.eagle3_aux_hidden_state_layers()
"""

LATER_CONFIG = changed(CONFIG, (FACTORS, LATER_FACTORS))
METHOD_BEFORE = '    def compute_hash(self) -> str:\n        """'


def with_method(source: str) -> str:
    return changed(source, (METHOD_BEFORE, INSERTED + METHOD_BEFORE))


PATCHED_CONFIG = changed(with_method(CONFIG), (HASH, CONFIG_HASHED + HASH))
PATCHED_LATER_CONFIG = changed(with_method(LATER_CONFIG), (LATER_READ, LATER_READ + LATER_HASHED))
PATCHED_RUNNER = changed(RUNNER, (RUNNER_GUARD, RUNNER_ASKS + RUNNER_GUARD))
PATCHED_OLD_RUNNER = changed(
    OLD_RUNNER, (OLD_SETS, OLD_ASKS + OLD_SETS), (OLD_DEFAULT, f"aux_layers or {OLD_DEFAULT}")
)
PATCHED_NEWER_RUNNER = changed(NEWER_RUNNER, (NEWER_GUARD, NEWER_ASKS + NEWER_GUARD))


class OnFile(AuxLayerIds):
    """The patch, on one file of vLLM whatever that is called here."""

    def __init__(self, path: str) -> None:
        self.file = path

    def codemod(self, path: str = "") -> type[AnchoredCodemod]:
        return super().codemod(self.file)

    def holds(
        self,
        module: ast.Module,
        models: Sequence[FamilyModel] = FAMILY,
        *,
        path: str = "",
        protocol: bool = True,
    ) -> bool:
        return super().holds(module, models, path=self.file, protocol=protocol)


CONFIG_FILE = OnFile("vllm/config/speculative.py")
RUNNER_FILE = OnFile(RUNNER_PATH)
NEWER_RUNNER_FILE = OnFile(NEWER_RUNNER_PATH)

FILES = {
    "config": (CONFIG_FILE, CONFIG, PATCHED_CONFIG),
    "config that hashes the top level": (CONFIG_FILE, LATER_CONFIG, PATCHED_LATER_CONFIG),
    "runner": (RUNNER_FILE, RUNNER, PATCHED_RUNNER),
    "runner without a reader": (RUNNER_FILE, OLD_RUNNER, PATCHED_OLD_RUNNER),
    "newer runner": (NEWER_RUNNER_FILE, NEWER_RUNNER, PATCHED_NEWER_RUNNER),
}
"""What is patched, the source, and what becomes of it, for each shape of a file."""
