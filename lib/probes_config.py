"""Probe of config.json: what it says twice, or says and nothing uses."""

from __future__ import annotations

from lib.candidates import rope_of
from lib.probing import Seen, View, probe


@probe("config")
def config(view: View) -> Seen:
    """What config.json says twice, or says and nothing uses (P1, P7)."""
    draft = view.case.draft
    layer = draft.config.get("transformer_layer_config", draft.config)
    flat, nested = layer.get("rope_theta"), (layer.get("rope_parameters") or {}).get("rope_theta")
    if flat and nested and flat != nested:
        yield f"config.json gives two thetas, rope_theta {flat:g} and rope_parameters {nested:g} (fault 11)"
    if (stated := rope_of(draft.config.get("transformer_layer_config", draft.config))) is not None:
        rope = draft.contract.rope
        if (stated.theta, stated.kind) != (rope.theta, rope.kind):
            yield f"config.json says {stated}, the declared contract has {rope}"
    head = view.case.head
    if (
        head is not None
        and (theirs := rope_of(head.config)) is not None
        and theirs.theta != draft.contract.rope.theta
    ):
        yield (
            f"theta {draft.contract.rope.theta:g} is not the target's {theirs.theta:g}: no fault by itself "
            "(fault 13), unless an engine shares one table"
        )
    window = layer.get("max_position_embeddings")
    longest = max((len(c) for c in view.sound), default=0)
    if window and longest > window:
        yield f"max_position_embeddings {window} is below the longest text, {longest} tokens (fault 15)"
    if unused := [k for k, use in draft.keys.items() if not use.startswith(("used", "ignored"))]:
        yield f"tensors that nothing uses: {', '.join(unused[:5])}"
    if draft.t2d is not None and len(draft.t2d) != draft.target_vocab:
        yield f"t2d has {len(draft.t2d)} entries, the target's vocabulary {draft.target_vocab} (fault 40)"
