"""``--write-draft-config``: a corrected copy of a draft model's config, its weights linked.

The original is never touched, and the copy is there whole or not at all.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eagle3_patch.doctor.checkpoint import CONFIG, CheckpointError
from vllm_eagle3_patch.doctor.expressions import NotUnderstoodError, evaluate
from vllm_eagle3_patch.doctor.rules.draft_config import remote_files
from vllm_eagle3_patch.doctor.situation import METHOD, THREE
from vllm_eagle3_patch.ground.errors import NotWritableError
from vllm_eagle3_patch.ground.layer_ids import BOUNDARY, CONVENTION, LAYER_IDS
from vllm_eagle3_patch.vllm_source.engine import NESTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.situation import Situation

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Written:
    """A copy that was written: its folder, what was changed, and what was not."""

    folder: Path
    changes: tuple[str, ...]
    notes: tuple[str, ...]


def write(situation: Situation, folder: Path) -> Written:
    """Write the corrected copy.

    Args:
        situation: What was judged.
        folder: Where to; it must not exist, or be empty, and not lie in the draft model's folder.

    Raises:
        CheckpointError: The folder is in use, or in the draft model's.
        NotWritableError: It cannot be written.
    """
    source = situation.given_draft.folder
    _refuse(folder, situation.given_draft.path.parent)
    config, changes, notes = corrected(situation)
    if source is None:
        notes = (*notes, "only a config was named, so no weights are linked")
    try:
        parent = folder.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))
        try:
            _fill(staged, source, config)
            staged.chmod(0o755)
            staged.replace(folder)  # An empty folder in its place is replaced too.
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
    except OSError as error:
        raise NotWritableError(
            f"{folder} cannot be written: {error.strerror or error}",
            "name a folder in a place where you may write",
        ) from error
    return Written(folder, changes, notes)


def _refuse(folder: Path, draft: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(
            f"{folder} exists and is no folder", "name a new one", code="folder-in-use"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(
            f"{folder} exists and is not empty", "name a new one", code="folder-in-use"
        )
    if folder.resolve().is_relative_to(draft.resolve()):
        raise CheckpointError(
            f"{folder} lies in the draft model's own folder",
            "name a folder beside it: nothing is written in place",
            code="folder-in-use",
        )


def _fill(staged: Path, source: Path | None, config: dict[str, Any]) -> None:
    for entry in sorted(source.iterdir()) if source is not None else ():
        if entry.name != CONFIG:
            (staged / entry.name).symlink_to(entry.resolve())
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    with (staged / CONFIG).open("w", encoding="utf-8", errors="surrogatepass") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def corrected(situation: Situation) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """The draft model's config as it should be, what was changed in it, and what was not."""
    config: dict[str, Any] = copy.deepcopy(dict(situation.given_draft.config))
    notes: list[str] = []
    changes = [
        *_layers(situation, config, notes),
        *_class(situation, config),
        *_norms(situation, config),
        *_vocabulary(situation, config),
    ]
    return config, tuple(changes), tuple(notes)


def _layers(situation: Situation, config: dict[str, Any], notes: list[str]) -> Iterator[str]:
    layers = situation.layers
    if layers.configured is None:
        notes.append("no layer ids are written: the config names none")
        return
    if situation.draft.speculators is not None:
        return
    wanted = sorted(layers.wanted)
    nested = config.get(NESTED)
    if isinstance(nested, dict) and LAYER_IDS in nested and nested[LAYER_IDS] != wanted:
        nested[LAYER_IDS] = wanted  # The draft model's class counts these from 0.22.0 on.
    # Boundaries are right for every vLLM, of which only a patched one reads the convention.
    values: dict[str, Any] = {LAYER_IDS: wanted}
    if layers.said_by is not None:
        values[CONVENTION] = BOUNDARY
    for key, value in values.items():
        if config.get(key) != value:
            config[key] = value
            yield f"{key}: {json.dumps(value)} at the top level"
    if len(wanted) != THREE and config.get("num_aux_hidden_states") != len(wanted):
        config["num_aux_hidden_states"] = len(wanted)
        yield f"num_aux_hidden_states: {len(wanted)}"


def _class(situation: Situation, config: dict[str, Any]) -> Iterator[str]:
    folder, mapping = situation.given_draft.folder, config.get("auto_map")
    if isinstance(mapping, dict):
        names = remote_files(mapping)
        if folder is None or not all((folder / name).is_file() for name in names):
            del config["auto_map"]
            yield "auto_map dropped: its files are not beside the config"
    if situation.rewritten_type is not None:
        config["model_type"] = "kimi_k2" if situation.draft.mla else "llama"
        yield f"model_type: {config['model_type']}"
    names_now = config.get("architectures")
    if not isinstance(names_now, list) or not names_now or situation.draft.speculators is not None:
        return
    known = situation.engine.draft_architectures
    plain = str(names_now[0]).removesuffix("Eagle3")
    if situation.renamed in known or situation.rewritten_type is not None:
        return
    try:
        other = evaluate(situation.engine.renaming.get(METHOD, ""), {"arch": plain})
    except NotUnderstoodError:
        return
    if other in known and plain != names_now[0]:
        config["architectures"] = [plain]
        yield f"architectures: {json.dumps([plain])}"


def _norms(situation: Situation, config: dict[str, Any]) -> Iterator[str]:
    kind = situation.draft_class
    for flag in _NORMS if kind is not None else ():
        nested = situation.draft.eagle_config.get(flag)
        if kind is not None and nested and flag in kind.keys and not config.get(flag):
            config[flag] = nested
            yield f"{flag}: {json.dumps(nested)} at the top level"


def _vocabulary(situation: Situation, config: dict[str, Any]) -> Iterator[str]:
    weights = situation.given_draft.weights
    head = weights.rows("lm_head.weight") if weights else None
    mapped = weights.rows("d2t") if weights else None
    if head and head == mapped and config.get("draft_vocab_size") != head:
        config["draft_vocab_size"] = head
        yield f"draft_vocab_size: {head}"
    own, target = config.get("draft_vocab_size"), situation.target.integer("vocab_size")
    if config.get("tie_word_embeddings") and own is not None and own != target:
        config["tie_word_embeddings"] = False
        yield "tie_word_embeddings: false"
