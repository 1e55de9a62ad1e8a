"""The draft model's ends: its embedding, its head, and the vocabulary between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_eagle3_patch.doctor.finding import ERROR, INFO, WARNING, Finding, report, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_eagle3_patch.doctor.situation import Situation

_HEADER = "the draft model's safetensors header"
_READ_DEFAULT = "0.11.0"


def _draft_vocabulary(situation: Situation) -> int | None:
    """The draft model's own vocabulary: the whole one if it names none."""
    own = situation.draft.integer("draft_vocab_size")
    return own if own is not None else situation.draft.integer("vocab_size")


@rule("lm-head", reports=(38, 39))
def lm_head(situation: Situation) -> Iterator[Finding]:
    """The head that will predict is not the one that the draft model was trained with.

    Reports 38 and 39: the proposer's load_model. From 0.11.1 on a draft model without a head takes
    the target's; 0.11.0 takes the target's wherever shapes agree; before, none is shared.
    """
    weights = situation.draft.weights
    target, own = situation.target.integer("vocab_size"), _draft_vocabulary(situation)
    if not situation.eagle3 or weights is None or target is None or own is None:
        return
    has = weights.name("lm_head.weight") is not None
    source = report(38, "https://github.com/sgl-project/sglang/issues/27829")
    if not has and own != target:
        yield Finding(
            "lm-head",
            ERROR,
            f"the draft model has a vocabulary of its own ({own} of {target} tokens) but no "
            "lm_head.weight",
            "its head is random or of the wrong size: nothing is accepted (length 1.00), or the "
            "first step fails",
            "download the checkpoint again, or use one that ships lm_head",
            f"no lm_head.weight in {_HEADER}",
            source,
        )
    elif not has and situation.engine.lm_head == "kept":
        yield Finding(
            "lm-head",
            ERROR,
            f"the draft model has no lm_head.weight, and {situation.release} does not share the "
            "target's with an EAGLE-3 draft model",
            "its head is random: nothing is accepted (length 1.00)",
            "use vLLM 0.11.1 or later, which shares it",
            f"no lm_head.weight in {_HEADER}",
            source,
        )
    elif has and own == target and situation.engine.lm_head == "by-shape":
        yield Finding(
            "lm-head",
            WARNING,
            f"{situation.release} puts the target's lm_head in place of the draft model's own, as "
            "both have the whole vocabulary",
            "a head that was trained is lost, and acceptance stays low",
            "use vLLM 0.11.1 or later, which keeps a head that differs",
            f"lm_head.weight in {_HEADER}",
            report(39, "https://github.com/vllm-project/vllm/pull/28549"),
        )


@rule("embed-tokens", reports=(37, 40))
def embed_tokens(situation: Situation) -> Iterator[Finding]:
    """The draft model ships an embedding of the target's shape, which may be anything.

    Reports 37 and 40. From 0.11.1 on vLLM keeps an embedding that differs from the target's; before
    that it takes the target's wherever shapes agree. Only the header is read: whether they are
    equal stays open.
    """
    weights = situation.draft.weights
    shape = weights.shape("embed_tokens.weight") if weights else None
    if not situation.eagle3 or shape is None:
        return
    same = shape == (
        situation.target.integer("vocab_size"),
        situation.target.integer("hidden_size"),
    )
    if not same:
        return
    # The speculators format always ships the target's own (its models' configs say which).
    kept = situation.engine.own_embeddings and situation.draft.speculators is None
    yield Finding(
        "embed-tokens",
        WARNING if kept else INFO,
        f"the draft model ships embed_tokens of the target's shape {list(shape)}; "
        + (
            f"{situation.release} uses it unless it equals the target's to the last bit"
            if kept
            else "the speculators format ships the target's own"
            if situation.draft.speculators is not None
            else f"{situation.release} uses the target's instead"
        ),
        "one exporter wrote random numbers there: nothing was accepted (report 37)"
        if kept
        else "none if the draft model was trained with the target's embedding",
        "compare a few rows of it with the target's; if they should be equal and are not, take "
        'the tensor out of the checkpoint. In the log "Detected EAGLE model with distinct '
        'embed_tokens weights" must not appear, and each rank must say the same'
        if kept
        else "",
        f"embed_tokens.weight in {_HEADER}",
        report(37, "https://github.com/lightseekorg/TorchSpec/issues/38"),
    )


@rule("vocab", reports=(16,))
def vocab(situation: Situation) -> Iterator[Finding]:
    """The vocabularies, the map between them, and the head's rows do not agree.

    Report 16: ``d2t`` has one entry for each of the draft model's tokens, ``t2d`` one for each of
    the target's (load_weights and compute_logits of llama_eagle3.py).
    """
    if not situation.eagle3:
        return
    draft, weights = situation.draft, situation.draft.weights
    whole, target = draft.integer("vocab_size"), situation.target.integer("vocab_size")
    own = _draft_vocabulary(situation)
    source = report(16, "https://github.com/SafeAILab/EAGLE/issues/249")

    def wrong(severity: str, message: str, consequence: str, fix: str, evidence: str) -> Finding:
        return Finding("vocab", severity, message, consequence, fix, evidence, source)

    kind = situation.draft_class
    if (
        kind is not None
        and draft.integer("draft_vocab_size") is None
        and not kind.vocabulary_default
    ):
        yield wrong(
            ERROR,
            f"the draft model's config has no draft_vocab_size, which {kind.path} of "
            f"{situation.release} needs",
            "\"object has no attribute 'draft_vocab_size'\"",
            f'write "draft_vocab_size": {whole} into the draft model\'s config, or use vLLM '
            f"{_READ_DEFAULT} or later",
            "draft_vocab_size of the draft model's config",
        )
    if whole is not None and target is not None and whole != target:
        yield wrong(
            WARNING,
            f"the draft model's vocab_size is {whole}, the target's is {target}",
            "token ids of one mean nothing to the other if the tokenizers differ: nothing is "
            "accepted, or an index is out of bounds",
            "use the draft model that was trained for this target",
            "vocab_size of both configs",
        )
    if own is not None and whole is not None and own > whole:
        yield wrong(
            ERROR,
            f"draft_vocab_size {own} is larger than the whole vocabulary, {whole}",
            "the draft model's logits have no place in the target's",
            f'write "draft_vocab_size": {whole} into the draft model\'s config',
            "draft_vocab_size of the draft model's config",
        )
    if (
        own is not None
        and target is not None
        and own != target
        and draft.value("tie_word_embeddings")
    ):
        yield wrong(
            WARNING,
            f"tie_word_embeddings is true, but the head has {own} rows and the embedding {whole}",
            '"size mismatch for lm_head.weight" in tools that tie them',
            'write "tie_word_embeddings": false into the draft model\'s config',
            "tie_word_embeddings of the draft model's config",
        )
    if weights is None or own is None:
        return
    rows = weights.rows("lm_head.weight")
    if rows is not None and rows != own:
        yield wrong(
            ERROR,
            f"lm_head.weight has {rows} rows, but the draft model's vocabulary is {own}",
            '"size mismatch for lm_head.weight"',
            f'write "draft_vocab_size": {rows} into the draft model\'s config',
            f"lm_head.weight in {_HEADER}",
        )
    mapped = weights.rows("d2t")
    if mapped is not None and mapped != own:
        yield wrong(
            ERROR,
            f"d2t has {mapped} entries, but the draft model's vocabulary is {own}",
            "the load fails on its shape",
            f'write "draft_vocab_size": {mapped} into the draft model\'s config',
            f"d2t in {_HEADER}",
        )
    if mapped is None and target is not None and own < target:
        yield wrong(
            ERROR,
            f"the draft model's vocabulary is {own} of {target} tokens, but the checkpoint has no "
            "d2t that says which",
            "its token 5 is taken for the target's token 5: nothing is accepted",
            "use a checkpoint that ships d2t",
            f"no d2t in {_HEADER}",
        )
    back = weights.rows("t2d")
    if back is not None and target is not None and back != target:
        yield wrong(
            WARNING,
            f"t2d has {back} entries, but the target's vocabulary is {target}",
            "the draft model was trained for another vocabulary",
            "use the draft model that was trained for this target",
            f"t2d in {_HEADER}",
        )
