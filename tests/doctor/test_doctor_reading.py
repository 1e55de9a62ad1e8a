"""What is read from the source agrees with what the matrix says of the family, in every release."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.fetch_release import fetch
from vllm_eagle3_patch.doctor.expressions import NotUnderstoodError, evaluate
from vllm_eagle3_patch.ground import matrix
from vllm_eagle3_patch.ground.errors import UnsupportedError
from vllm_eagle3_patch.ground.family import FAMILY, FamilyModel
from vllm_eagle3_patch.ground.matrix import ModelPin, Release
from vllm_eagle3_patch.vllm_source import draft_classes
from vllm_eagle3_patch.vllm_source.engine import Engine
from vllm_eagle3_patch.vllm_source.read_engine import architectures_of_interest, for_matrix, read
from vllm_eagle3_patch.vllm_source.registry import Registry
from vllm_eagle3_patch.vllm_source.sources import Sources

RELEASES = matrix.oldest_first()
TABLES = {release.name: matrix.load_doctor(release.name)[0] for release in RELEASES}


def missing(engine: Engine, model: FamilyModel) -> set[str]:
    """The patches that a model lacks, as the doctor's reading sees it."""
    kind = engine.targets[model.architecture]
    found = set()
    if not kind.language_model:
        found.add("deepseek-v2")
    if model.wrapper is not None:
        if not kind.interface:
            found.add(model.wrapper.patch)
        token, there = model.wrapper.image_token, engine.image_tokens.get(model.architecture)
        if token and engine.image_fallback and there != token:
            found.add("multimodal-image-token")
    elif not kind.interface:
        found.add("deepseek-v2")
    admitted = engine.allowlist
    if admitted is not None and not all(
        any(item in text for item in admitted) for text in model.text_types
    ):
        found.add("eagle3-allowlist")
    if engine.targets_metadata and not engine.one_page_size:
        found.add("draft-attention-metadata")
    return found


def limits(engine: Engine, model: FamilyModel) -> set[str]:
    kind = engine.targets[model.architecture]
    found = set()
    if not kind.relays:
        found.add("pipeline-parallel")
    if engine.dual_batch_overlap == "fails":
        found.add("dual-batch-overlap")
    if kind.float16_scaling:
        found.add("float16")
    if kind.partial_sums:
        found.add("platform")
    if not engine.decides_layers and "eagle_config" not in engine.keys:
        found.add("nested-layer-ids")
    return found


def models_of(release: Release) -> list[tuple[ModelPin, FamilyModel]]:
    by_name = {model.architecture: model for model in FAMILY}
    return [(pin, by_name[pin.architecture]) for pin in release.models]


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_the_family_is_read_as_the_survey_reads_it(release: Release) -> None:
    table, changes = matrix.load_doctor(release.name)
    stock = Engine.of_table(table)
    patched = stock.with_changes(changes)
    not_compared = {"forced-mla-backend", "blackwell"}
    for pin, model in models_of(release):
        assert missing(stock, model) == set(pin.missing), model.architecture
        assert limits(stock, model) == set(pin.limits) - not_compared, model.architecture
        if pin.support == "patch":
            assert missing(patched, model) == set(pin.missing_patched), model.architecture
            assert limits(patched, model) == set(pin.limits_patched) - not_compared


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_tables_of_the_matrix_come_back_as_they_were(release: Release) -> None:
    table, changes = matrix.load_doctor(release.name)
    engine = Engine.of_table(table)
    assert engine.table() == table
    assert engine.changes_to(engine.with_changes(changes)) == changes


def first_with(text: str) -> str | None:
    """The first release whose table of the doctor mentions something."""
    return next((r.name for r in RELEASES if text in str(TABLES[r.name])), None)


def test_what_came_when() -> None:
    """Against the reports' dates of keys and classes."""
    assert first_with("LlamaForCausalLMEagle3") == "0.10.2"
    assert first_with("Eagle3DeepseekV2ForCausalLM") == "0.18.0"
    assert first_with("norm_before_residual") == "0.10.1"
    assert first_with("norm_before_fc") == "0.18.0"
    assert first_with("fc_norm") == "0.22.0"
    assert first_with("norm_output") == "0.22.0"
    assert first_with("num_aux_hidden_states") == "0.22.0"
    assert first_with("'use_aux_hidden_state'") == "0.12.0"
    assert first_with("'own_embeddings': True") == "0.11.1"
    assert first_with("'backend_option': True") == "0.21.0"
    assert first_with("'keys': ['top', 'eagle_config']") == "0.22.0"
    assert first_with("eagle_config.layer_ids") == "0.27.0"
    assert first_with("'hashed_ids': 'top'") == "0.17.0"
    assert first_with("'everywhere': True") == "0.29.0"
    gone = [r.name for r in RELEASES if "allowlist" not in TABLES[r.name]]
    assert gone[0] == "0.22.0"


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (
            "arch if arch.startswith('Eagle3') or arch.endswith('Eagle3') else f'Eagle3{arch}'",
            "XEagle3",
        ),
        ("f'Eagle{arch}' if not arch.startswith('Eagle') else arch", "EagleXEagle3"),
        ("'Fixed'", "Fixed"),
        ("n // 2 - 3 + 1 * 2", 29),
        ("arch == 'XEagle3' and not n == 5", True),
    ],
)
def test_expressions(source: str, value: object) -> None:
    assert evaluate(source, {"arch": "XEagle3", "n": 61}) == value


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').system('x')",
        "arch.upper()",
        "x",
        "(",
        "arch + 1",
        "1 // 0",
        "[1]",
        "lambda: 1",
        "(" * 500,
        "9" * 3000,
        "f'{n}'",
        "arch.startswith(1)",
        "2 ** 1000000000",
    ],
)
def test_expressions_that_are_not_understood(source: str) -> None:
    with pytest.raises(NotUnderstoodError):
        evaluate(source, {"arch": "X", "n": 61})


def test_a_folder_that_is_no_vllm(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        read(Sources(tmp_path), ["DeepseekV3ForCausalLM"])


CONFIG = """
class SpeculativeConfig:
    def __post_init__(self):
        if self.method == "eagle3" and not any(
            item in self.target_model_config.hf_text_config.model_type for item in supported
        ):
            raise ValueError
"""


def test_a_look_alike_with_little_in_it(tmp_path: Path) -> None:
    """A source of which most is missing is read as far as it goes."""
    config = tmp_path / "vllm" / "config" / "speculative.py"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG, encoding="utf-8")
    engine = read(Sources(tmp_path), ["DeepseekV3ForCausalLM"])
    assert engine.targets == {}
    assert engine.allowlist == ()
    assert engine.keys == ()
    assert engine.newer_runner is None
    assert engine.transformers == ""


def test_classes_that_derive_from_each_other_end(tmp_path: Path) -> None:
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text('T = {"A": ("a", "A")}\n', encoding="utf-8")
    (models / "a.py").write_text("from .b import B\nclass A(B): ...\n", encoding="utf-8")
    (models / "b.py").write_text("from .a import A\nclass B(A): ...\n", encoding="utf-8")
    registry = Registry(Sources(tmp_path))
    ((path, owner),) = registry.classes("A")
    assert len(list(registry.lineage(path, owner))) < 50


def test_types_that_are_rewritten() -> None:
    source = """
class SpeculativeConfig:
    def hf_config_override(hf_config):
        if hf_config.model_type in ("deepseek_v3", "glm"):
            hf_config.model_type = "deepseek_mtp"
        if hf_config.model_type == "deepseek_mtp":
            hf_config.update({"architectures": ["DeepSeekMTPModel"]})
"""
    types, given = draft_classes.rewritten(ast.parse(source))
    assert types == {"deepseek_v3": "deepseek_mtp", "glm": "deepseek_mtp"}
    assert given == {"deepseek_mtp": "DeepSeekMTPModel"}


@pytest.mark.parametrize("name", ["0.10.2", "0.17.1"])
def test_the_matrix_holds_what_is_read(name: str) -> None:
    """Read again, a release gives the same table."""
    sources = Sources(fetch(name))
    engine = for_matrix(read(sources, architectures_of_interest(sources)))
    assert engine.table() == TABLES[name]
