"""Probes of the draft's weights and of its vocabulary maps, beside the target's head where there is one.

P1, P2, ... are the probes of the formats reference, section B.0.

Axes: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lib.case import Finding
from lib.probing import NEEDS, Seen, View, probe

ROWS = 512  # rows of a table compared with the target's


@probe("weights")
def weights(view: View) -> Seen:
    """Weights that are not finite, zero, freshly initialised, or never loaded (P1)."""
    draft = view.case.draft
    tensors = {"norm": draft.norm, "lm_head": draft.lm_head, "fc": draft.fc, "input_norm": draft.input_norm}
    tensors |= {f"fc_norm.{i}": x for i, x in enumerate(draft.fc_norm)}
    for i, layer in enumerate(draft.layers):
        tensors |= {f"layers.{i}.{k}": v for k, v in vars(layer).items()}
    tensors = {k: v for k, v in tensors.items() if isinstance(v, Tensor)}
    if view.bad_weights:
        lines = tuple(f"{bad} of {n} numbers of {name}" for name, (bad, n) in view.bad_weights.items())
        yield Finding("weights_nonfinite", "weights", ", ".join(view.bad_weights), "NaN or Inf",
                      "finite numbers", lines)  # fmt: skip
    for name, x in tensors.items():
        if not bool(x.any()) and not name.endswith("bias"):
            yield Finding("layer_unloaded", "weights", name, "zero", "trained weights",
                          (f"all {x.numel()} numbers of {name} are 0",))  # fmt: skip
    if draft.fc is not None:
        blocks = [float(b.float().norm()) for b in draft.fc.chunk(draft.n_slots, 1)]
        for i, size in enumerate(blocks):
            if size < 1e-3 * max(blocks):
                yield Finding("slot_zero", "weights", f"fc slot {i}", "no weight", "trained weights",
                              (f"norms of the slots' columns: {[round(b, 3) for b in blocks]}",))  # fmt: skip
    yield from _layers(view)
    ones = [k for k, v in tensors.items() if v.ndim == 1 and "bias" not in k and bool((v == 1).all())]
    first = draft.layers[0]
    fresh = {
        k: float(v.float().std()) for k, v in vars(first).items() if isinstance(v, Tensor) and v.ndim == 2
    }
    own = [k for k in ones if k.startswith("layers.0.")]
    if own and len(own) == sum(k.startswith("layers.0.") and v.ndim == 1 and "bias" not in k
                               for k, v in tensors.items()):  # fmt: skip
        spread = ", ".join(f"{k} {v:.4f}" for k, v in fresh.items())
        yield Finding(
            "layer_unloaded", "weights", "layers.0", "freshly initialised", "trained weights",
            (f"all {len(own)} norm weights of the layer are exactly 1", f"spread of its matrices: {spread}"),
        )  # fmt: skip
        ones = [k for k in ones if k not in own]
    if ones:
        yield Finding(
            "norm_ones", "weights", ", ".join(ones), "exactly 1", "a trained weight",
            tuple(f"all {tensors[k].numel()} numbers of {k} are exactly 1" for k in ones),
        )  # fmt: skip


def _layers(view: View) -> Seen:
    draft = view.case.draft
    if draft.fc is not None and draft.layers[0].hidden_norm is None:
        yield Finding("hidden_norm_lost", "weights", "layers.0.hidden_norm", "no such weight",
                      "hidden_norm.weight", ("the draft has fc and no hidden_norm",))  # fmt: skip
        first = replace(draft.layers[0], hidden_norm=torch.ones_like(draft.norm))
        view.settled.add("head_norm")  # without the trained weight the size of everything behind is another
        view.case = replace(view.case, draft=replace(draft, layers=(first, *draft.layers[1:])))
        view.changes.append("layers.0.hidden_norm taken as 1")
    stated = draft.config.get("transformer_layer_config", draft.config).get("num_hidden_layers")
    if isinstance(stated, int) and stated != len(draft.layers):
        yield Finding("layer_lost", "weights", "layers", str(len(draft.layers)), str(stated),
                      (f"config.json says {stated} layers, the file has {len(draft.layers)}",))  # fmt: skip


@probe("embedding", "head")
def embedding(view: View) -> Seen:
    """The draft's token embeddings against the target's, row by row (P1)."""
    draft, table = view.case.draft, view.case.head.embed
    if draft.embed is table or draft.embed.shape != table.shape:
        return
    at = torch.linspace(0, len(table) - 1, min(ROWS, len(table))).long()
    own, theirs = draft.embed[at].float(), table[at].float()
    cosine = float((normalize(own, dim=-1) * normalize(theirs, dim=-1)).sum(-1).mean())
    if abs(cosine) < 0.1:
        yield Finding(
            "embed_random", "embedding", "embed_tokens", "the draft's own", "the target's",
            (f"mean cosine with the target's rows {cosine:.3f} (n = {len(at)}), "
             f"spread {float(own.std()):.4f}",),
            fix=replace(draft, embed=table),
        )  # fmt: skip
    elif cosine < 0.999:
        yield f"the draft has an embedding of its own: mean cosine with the target's rows {cosine:.3f}"


@probe("lm_head", "width")
def lm_head(view: View) -> Seen:
    """Rows of lm_head that are the target's bit by bit: overwritten, or never trained (P1)."""
    draft, table = view.case.draft, view.case.head.lm_head
    if draft.draft_vocab == draft.target_vocab:
        return
    rows = torch.arange(draft.draft_vocab)
    ids = draft.to_target(rows, "offset")
    inside = int(ids.min()) >= 0 and int(ids.max()) < len(table)
    if not inside or not bool(_equal(table, ids[:ROWS], draft.lm_head[:ROWS]).all()):
        # The map may be wrong as well: rows of the target that they resemble, whatever it says.
        rows, ids = _sample(view)
        if ids is None:
            return
    same = int(_equal(table, ids, draft.lm_head[rows]).sum())
    if same > 0.99 * len(ids):
        yield Finding(
            "lm_head_overwritten", "lm_head", "lm_head", "the target's rows", "the draft's own",
            (f"{same} of {len(ids)} rows equal the target's bit by bit: training would have moved them",),
        )  # fmt: skip


def _equal(table: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """(n,) rows that equal those of the target bit by bit."""
    return (table[ids].to(rows.dtype) == rows).all(-1)


# ---- vocabulary maps ----------------------------------------------------------------------------


@probe("map")
def vocabulary_map(view: View) -> Seen:
    """d2t by itself and against t2d: order, range, known defaults (P2)."""
    draft = view.case.draft
    if draft.d2t is None:
        if draft.draft_vocab < draft.target_vocab:
            yield Finding("map_identity", "map", "d2t", "none", "the map of the training run",
                          (f"{draft.draft_vocab} of {draft.target_vocab} ids, and no d2t",))  # fmt: skip
        return
    kind, why = map_doubt(view)
    if kind:
        fix = _map_fix(view)
        after = (
            "rebuilt from t2d" if fix is not None and _whole_t2d(draft) else "rebuilt from rows of lm_head"
        )
        # Not ascending is odd, not impossible; the others are no map, or contradict the file itself.
        sure = kind != "d2t_permuted"
        yield Finding(kind, "map", "d2t", "as stored", after if fix else "the map of the training run",
                      (why,), fix=fix, sure=sure)  # fmt: skip


def map_doubt(view: View) -> tuple[str, str]:
    """(fault key or "", sentence): which known wrong map the stored d2t is."""
    draft = view.case.draft
    n, rows = draft.draft_vocab, torch.arange(draft.draft_vocab)
    d2t = draft.d2t.long()
    ids = rows + d2t
    if n == draft.target_vocab and not bool(d2t.any()):
        return "", ""
    rising = bool((ids[1:] > ids[:-1]).all())
    outside = int(((ids < 0) | (ids >= draft.target_vocab)).sum())
    t2d = draft.t2d.nonzero().flatten() if _whole_t2d(draft) else None
    if torch.equal(d2t, rows) and n > 1:
        return "d2t_arange", f"d2t equals 0 .. {n - 1}: draft id i would mean 2i (n = {n})"
    if t2d is not None and torch.equal(d2t, t2d):
        return "d2t_absolute", f"d2t holds the {n} target ids of t2d themselves, not offsets"
    if outside:
        kind = "d2t_absolute" if bool((d2t[1:] > d2t[:-1]).all()) else "d2t_stale"
        return kind, f"{outside} of {n} draft ids would mean ids outside 0 .. {draft.target_vocab - 1}"
    if not bool(d2t.any()) and (t2d is None or not torch.equal(t2d, rows)):
        return "d2t_zeros", f"d2t is zero everywhere, with {n} of {draft.target_vocab} ids"
    if t2d is not None and not torch.equal(t2d, ids.sort().values):
        differ = n - int(torch.isin(ids, t2d).sum())
        return "d2t_stale", f"d2t and t2d disagree on {differ} of {n} ids"
    if not rising:
        back = int((ids[1:] <= ids[:-1]).sum())
        return "d2t_permuted", f"{back} of {n} mapped ids do not ascend"
    return "", ""


def _whole_t2d(draft) -> bool:
    return draft.t2d is not None and int(draft.t2d.sum()) == draft.draft_vocab


def _map_fix(view: View):
    draft, rows = view.case.draft, torch.arange(view.case.draft.draft_vocab)
    if _whole_t2d(draft):
        d2t = draft.t2d.nonzero().flatten() - rows
        return None if torch.equal(d2t, draft.d2t.long()) else replace(draft, d2t=d2t)
    if NEEDS["width"][1](view) and (ids := _resembled(view, rows)) is not None:
        return replace(draft, d2t=ids - rows)
    return None


def _resembled(view: View, rows: Tensor) -> Tensor | None:
    """Target row that each of these rows of lm_head resembles most; None if they resemble none."""
    table = normalize(view.case.head.lm_head.float(), dim=-1)  # (V, H)
    found = [
        (normalize(x.float(), dim=-1) @ table.T).max(-1) for x in view.case.draft.lm_head[rows].split(256)
    ]
    best, ids = (torch.cat([f[k] for f in found]) for k in (0, 1))
    return ids if float(best.median()) > 0.5 and len(ids.unique()) > 0.9 * len(ids) else None


def _sample(view: View) -> tuple[Tensor, Tensor | None]:
    """Some rows of lm_head, and the target's rows that they resemble most; None if they resemble none."""
    if "sample" not in view.shared:
        n = view.case.draft.draft_vocab
        at = torch.linspace(0, n - 1, min(ROWS, n)).long()
        view.shared["sample"] = at, _resembled(view, at)
    return view.shared["sample"]


@probe("map rows", "width")
def map_rows(view: View) -> Seen:
    """Rows of lm_head start as the target's: do they resemble the rows that d2t names? (P2, fault 22)."""
    draft = view.case.draft
    if draft.d2t is None or draft.draft_vocab == draft.target_vocab:
        return
    at, like = _sample(view)
    named = draft.to_target(at, "offset")
    if like is None:
        yield "rows of lm_head resemble no rows of the target's: a stale map cannot be seen in them"
        return
    agree = int((like == named).sum())
    if agree >= 0.9 * len(at):
        return
    rows = torch.arange(draft.draft_vocab)
    ids = _resembled(view, rows)
    doubt, _ = map_doubt(view)
    same_set = ids is not None and torch.equal(ids.sort().values, (rows + draft.d2t.long()).sort().values)
    yield Finding(
        doubt or ("d2t_permuted" if same_set else "d2t_stale"), "map rows", "d2t", "as stored",
        "rebuilt from rows of lm_head",
        (f"{agree} of {len(at)} rows of lm_head resemble the target row that d2t names most",),
        fix=None if ids is None else replace(draft, d2t=ids - rows), sure=agree < 0.5 * len(at),
    )  # fmt: skip
