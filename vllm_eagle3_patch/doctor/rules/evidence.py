"""What could not be seen: keys that are missing, and weights that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import INFO, WARNING, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.checkpoint import Checkpoint
    from vllm_eagle3_patch.doctor.situation import Situation

TARGET_KEYS = ("hidden_size", "num_hidden_layers", "vocab_size")
DRAFT_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@rule("missing-key", reports=(44,))
def missing_key(situation: Situation) -> Iterator[Finding]:
    """A key that other rules need is not there, so nothing can be called healthy.

    Report 44: the same weights with a slightly different config accepted badly.
    """
    for model, keys in ((situation.target, TARGET_KEYS), (situation.draft, DRAFT_KEYS)):
        missing = list(_missing(model, keys))
        if missing:
            yield Finding(
                "missing-key",
                WARNING,
                f"the {model.role}'s config lacks {', '.join(missing)}",
                "what depends on that was not judged; Transformers puts a default in its place",
                "take the config from the model's own repository",
                str(model.path.name),
                report(44, "https://github.com/vllm-project/speculators/pull/268"),
            )


def _missing(model: Checkpoint, keys: tuple[str, ...]) -> Iterator[str]:
    if model.architecture is None:
        yield "architectures"
    if model.model_type is None:
        yield "model_type"
    yield from (key for key in keys if model.integer(key) is None)


@rule("weights", reports=(17,))
def weights(situation: Situation) -> Iterator[Finding]:
    """No safetensors file of the draft model was seen, so its tensors were not judged.

    Report 17.
    """
    if situation.draft.weights is not None:
        return
    place = situation.given_draft.folder
    where = "only its config was named" if place is None else "its folder has none"
    yield Finding(
        "weights",
        INFO,
        f"no safetensors file of the draft model was seen ({where})",
        "lm_head, embed_tokens, d2t, fc and norms were not compared with the config",
        "name the folder with the weights; only their headers are read",
        "*.safetensors beside the draft model's config",
        report(17, "https://github.com/vllm-project/vllm-ascend/issues/10801"),
    )
