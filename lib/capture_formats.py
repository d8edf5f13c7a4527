"""Capture files of every framework: what a file could be, and one reader per layout.

| layout | writer's file | values |
|---|---|---|
| `speculators-legacy` | `data_N.pt` | `input_ids`, `loss_mask`, `hidden_states`: list of [L, H] |
| `speculators` / vLLM | `hs_N.safetensors` | `token_ids`, `hidden_states` [L, k, H]; no mask |
| `workbook` | `*.safetensors` with our metadata | `token_ids`, `loss_mask`, `tap.K` [L, H], `final` [L, H] |
| `specforge` | `data_N.ckpt`, `.ckpt.gz` | `aux_hidden_state` [1, L, kH], `hidden_state` [1, L, H] the last |
| `modelopt` | `<conversation>.pt` | `aux_hidden_states` [L, kH], `hidden_states` [L, H] the last |
| `angelslim` | `data_N.ckpt` | `hidden_states` [1, L, kH] aux, `target_hiddens` [1, L, H] the last |
| `baldeagle` | `data_N.ckpt` | `hidden_state` [1, L, kH] aux, `target_hidden_states` [1, L, H] the last |

The same word means opposite things (`hidden_state`, `hidden_states`), so keys, shapes and dtypes decide,
never the suffix. Sources: formats_and_faults A.1; SpecForge `specforge/algorithms/eagle3/data.py`,
Model-Optimizer `collect_hidden_states/*.py`, AngelSlim `tools/generate_hidden_for_draft_model.py`, BaldEagle
`generate_data.py`.

How a file is opened, and the checks that layouts share, are in `lib.containers`; what a capture can do once
it is read is in `lib.captures`.

Axes: L positions, H target hidden size, k stored states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from lib.containers import Source, Value, check_states, loss_mask, open_source, rows, tensor, token_ids
from lib.errors import CaptureError
from lib.formats import Match, only
from lib.taps import Stored, Tap

FORMAT = "eagle3-workbook-capture"
FINAL = "final"
UNNAMED = "taps not recorded in the file"
# NeMo Automodel components/speculative/precompute_eagle3.py: whole, or compressed to the top k.
SUPERVISION = ("target_probs", "target_probs_values", "target_probs_indices", "position_mask")


@dataclass(frozen=True)
class Content:
    """What one file holds, before it becomes a `Capture`.

    Attributes:
        layout: one of CAPTURE_FORMATS.
        token_ids: (L,) integers.
        loss_mask: (L,) or None where the file has none.
        names: of the stored states, in stored order.
        readers: name (or FINAL) -> function that reads the state, (L, H).
        hidden_size: H.
        final_kind: only where the format (or the file) fixes it.
        notes: every default that was taken.
    """

    layout: str
    token_ids: Tensor
    loss_mask: Tensor | None
    names: tuple[Tap | Stored, ...]
    readers: Mapping[Tap | Stored | str, Callable[[], Tensor]] = field(repr=False)
    hidden_size: int
    final_kind: Literal["pre_norm", "post_norm"] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One layout: the keys it needs and may have, how its shapes look, and its reader.

    Attributes:
        needs: keys that every file of it has.
        may: further keys -> what is done with them ("" if they are read).
        fits: (source) -> evidence from shapes and types, or None if they speak against it.
        read: (source) -> Content.
    """

    needs: frozenset[str]
    may: Mapping[str, str]
    fits: Callable[[Source], tuple[str, ...] | None]
    read: Callable[[Source], Content]


@dataclass(frozen=True)
class Pair:
    """A layout of two float states: aux [.., L, k*H] and last [.., L, H]."""

    name: str
    aux: str
    last: str
    final_kind: Literal["post_norm"] | None
    about_final: str
    notes: tuple[str, ...] = ()


_UNSAID = "the format does not say whether its last state is before or after the final norm"
PAIRS = (
    Pair(
        "specforge", "aux_hidden_state", "hidden_state", "post_norm",
        "last state taken as post-norm: SpecForge feeds it straight to lm_head (target_head.py)",
        # No pair ends at the last token, so zeroing its mask changes no scored position here.
        ("loss mask as stored; SpecForge zeroes its last element at load (algorithms/eagle3/data.py), and "
         "scores the pair at t by mask[t], not mask[t + 1]",),
    ),
    Pair(
        "modelopt", "aux_hidden_states", "hidden_states", None,
        f"{_UNSAID} (Model-Optimizer: Hugging Face dumps post-norm, vLLM dumps pre-norm)",
    ),
    Pair(
        "angelslim", "hidden_states", "target_hiddens", None,
        f"{_UNSAID} (AngelSlim: outputs.hidden_states[-1])",
    ),
    Pair(
        "baldeagle", "hidden_state", "target_hidden_states", "post_norm",
        "last state taken as post-norm: BaldEagle stores transformers' hidden_states[-1] (generate_data.py)",
    ),
)  # fmt: skip


# ---- recognising ------------------------------------------------------------------------------


def recognise(path: str | Path) -> list[Match]:
    """Every layout that the file could be, by keys, shapes and dtypes; empty if none.

    Raises CaptureError for a file that cannot be opened, or that holds something refused by name
    (fp8 states, a cache of target probabilities, EAGLE-1 data).
    """
    source = open_source(Path(path))
    _refuse_by_name(source)
    return _matches(source)


def read_capture(path: Path, layout: str | None = None) -> Content:
    """Read one file, of the layout that its content says (or that the caller insists on).

    Raises CaptureError: unreadable, of no known layout, of several, or malformed within its layout.
    """
    if layout is not None and layout not in LAYOUTS:
        raise CaptureError(
            path, "layout", expected=f"one of {list(CAPTURE_FORMATS)}", found=repr(layout),
            remedy="leave it out: the content decides unless two layouts fit",
        )  # fmt: skip
    source = open_source(path)
    _refuse_by_name(source)
    matches = _matches(source)
    if not matches:
        # Nothing fits whole: the layout with the nearest keys says what is wrong with the file.
        near = _nearest(source, layout)
        if near:
            matches = [Match(near, ("the nearest by its keys",))]
    match = only(
        path,
        matches,
        CaptureError,
        wanted=layout,
        known=CAPTURE_FORMATS,
        seen=f"keys {sorted(source.values)}",
    )
    chosen = LAYOUTS[match.format]
    # The keys of our own files depend on their taps: that reader accounts for them itself.
    notes = _explain(source, chosen, layout) if match.format != "workbook" else []
    content = chosen.read(source)
    return Content(**{**vars(content), "notes": (*content.notes, *notes)})


def _matches(source: Source) -> list[Match]:
    if source.metadata.get("format") == FORMAT:
        return [Match("workbook", (f"metadata format {FORMAT}",))]
    found = []
    for name, layout in LAYOUTS.items():
        if name != "workbook" and layout.needs <= set(source.values):
            shapes = layout.fits(source)
            if shapes is not None:
                found.append(Match(name, (f"keys {', '.join(sorted(layout.needs))}", *shapes)))
    return found


def _nearest(source: Source, layout: str | None) -> str | None:
    """The layout whose keys are nearest, if any key is shared; ties go to the earlier one."""
    keys = set(source.values)
    candidates = [n for n in LAYOUTS if n != "workbook" and layout in (None, n) and LAYOUTS[n].needs & keys]

    def distance(name: str) -> int:
        layout = LAYOUTS[name]
        shaped = layout.needs <= keys and layout.fits(source) is not None
        surplus = keys - layout.needs - set(layout.may)
        return len(layout.needs - keys) + len(surplus) + (layout.needs <= keys and not shaped)

    return min(candidates, key=distance, default=None)


def _refuse_by_name(source: Source) -> None:
    found = [key for key in SUPERVISION if key in source.values]
    if found:
        raise CaptureError(
            source.path, found[0], expected="hidden states, the target's last one among them",
            found="NeMo Automodel's precomputed cache: target probabilities over the draft vocabulary",
            remedy="capture states instead: the target's own state cannot be had from this cache",
        )  # fmt: skip
    for name, value in source.values.items():
        parts = value.parts if value.parts is not None else (value,)
        for i, part in enumerate(parts):
            if "float8" in str(part.dtype) or str(part.dtype).startswith("F8_"):
                where = name if value.parts is None else f"{name}[{i}]"
                raise CaptureError(
                    source.path, where, expected="fp16, bf16, fp32 or fp64",
                    found=f"fp8 data ({part.dtype})",
                    remedy="dequantise first: scales of speculators' unmerged fp8 branch are not read here",
                )  # fmt: skip
    state = source.values.get("hidden_state")
    if set(source.values) == {"input_ids", "loss_mask", "hidden_state"} and state.shape is not None:
        raise CaptureError(
            source.path, "hidden_state", expected="a state for the draft's slots besides the last one",
            found="EAGLE-1 data (EAGLE, BaldEagle): the last state alone",
            remedy="capture with the aux states of EAGLE-3",
        )  # fmt: skip


def _explain(source: Source, layout: Layout, asked: str | None) -> list[str]:
    """Account for every key; notes on those that are known and not read."""
    keys = set(source.values)
    extra = keys - layout.needs - set(layout.may)
    notes = [f"{key}: {why}" for key, why in sorted(layout.may.items()) if why and key in keys]
    if asked:
        # The caller chose between two layouts: keys of the other one are surplus, not a surprise.
        others = extra & set().union(*(other.needs for other in LAYOUTS.values()))
        notes += [f"{key}: not read, it belongs to another layout than {asked}" for key in sorted(others)]
        extra -= others
    if layout.needs - keys or extra:
        raise CaptureError(
            source.path, "keys", expected=str(sorted(layout.needs)),
            found=f"missing {sorted(layout.needs - keys)}, unexpected {sorted(extra)}",
            remedy="this file belongs to another framework, or its writer was interrupted",
        )  # fmt: skip
    return notes


# ---- speculators and vLLM ---------------------------------------------------------------------


def _read_stack(source: Source) -> Content:
    path, stack = source.path, tensor(source, "hidden_states")
    ids = token_ids(source, "token_ids")
    if len(stack.shape) != 3:
        raise CaptureError(
            path, "hidden_states", expected="[positions, states, hidden size]", found=str(stack.shape),
            remedy="this is not a speculators / vLLM capture; see formats A.1 for look-alikes",
        )  # fmt: skip
    check_states(path, "hidden_states", stack.shape, stack.dtype, len(ids))
    names = tuple(Stored(i) for i in range(stack.shape[1]))
    readers = {name: (lambda i=name.index: stack.read((slice(None), i))) for name in names}
    return Content("speculators", ids, None, names, readers, stack.shape[2], notes=(UNNAMED,))


def _read_legacy(source: Source) -> Content:
    path, value = source.path, source.values["hidden_states"]
    tensor(source, "input_ids"), tensor(source, "loss_mask")
    states = value.parts
    if not states or any(s.shape is None for s in states):
        raise CaptureError(
            path, "hidden_states", expected="a list of [positions, hidden size] tensors",
            found=value.kind, remedy="this is not the legacy list format; see formats A.1",
        )  # fmt: skip
    ids, mask = token_ids(source, "input_ids"), loss_mask(source)
    for i, state in enumerate(states):
        name = f"hidden_states[{i}]"
        if len(state.shape) != 2 or state.shape[1] != states[0].shape[1]:
            width = (states[0].shape or ("hidden size",))[-1]
            raise CaptureError(
                path, name, expected=f"[positions, {width}] like hidden_states[0]",
                found=str(state.shape), remedy="the list is ragged: recapture this sample",
            )  # fmt: skip
        check_states(path, name, state.shape, state.dtype, len(ids))
    names = tuple(Stored(i) for i in range(len(states)))
    readers = {name: states[name.index].read for name in names}
    return Content("speculators-legacy", ids, mask, names, readers, states[0].shape[1], notes=(UNNAMED,))


# ---- the workbook's own -----------------------------------------------------------------------


def _read_workbook(source: Source) -> Content:
    path, values = source.path, source.values
    taps = tuple(sorted(Tap(int(m[1])) for k in values if (m := re.fullmatch(r"tap\.(\d{1,6})", k))))
    states = {tap: f"tap.{tap.after_block}" for tap in taps}
    states |= {FINAL: FINAL} if FINAL in values else {}
    exact = Layout(frozenset({"token_ids", "loss_mask", *states.values()}), {}, _no_shapes, _read_workbook)
    _explain(source, exact, None)
    kind = source.metadata.get("final_kind") or None
    if FINAL in values and kind not in ("pre_norm", "post_norm"):
        raise CaptureError(
            path, "metadata final_kind", expected="pre_norm or post_norm", found=repr(kind),
            remedy="write the file with save_capture(final_kind=...)",
        )  # fmt: skip
    ids, mask = token_ids(source, "token_ids"), loss_mask(source)
    for key in states.values():
        value = tensor(source, key)
        if len(value.shape) != 2:
            raise CaptureError(
                path, key, expected="[positions, hidden size]", found=str(value.shape),
                remedy="write the file with save_capture()",
            )  # fmt: skip
        check_states(path, key, value.shape, value.dtype, len(ids))
    widths = {values[key].shape[1] for key in states.values()}
    if len(widths) != 1:
        raise CaptureError(
            path, "states", expected="at least one state, all of one hidden size",
            found=f"widths {sorted(widths)}", remedy="write the file with save_capture()",
        )  # fmt: skip
    readers = {tap: values[key].read for tap, key in states.items()}
    return Content("workbook", ids, mask, taps, readers, widths.pop(), kind if FINAL in values else None)


# ---- aux and last: SpecForge, Model-Optimizer, AngelSlim, BaldEagle ---------------------------


def _ratio(source: Source, pair: Pair) -> float | None:
    """Width of aux over width of last; None where one is no tensor or has no axis."""
    aux, last = source.values[pair.aux], source.values[pair.last]
    if not aux.shape or not last.shape or not last.shape[-1]:
        return None
    return aux.shape[-1] / last.shape[-1]


def _fits_pair(pair: Pair) -> Callable[[Source], tuple[str, ...] | None]:
    def fits(source: Source) -> tuple[str, ...] | None:
        ratio = _ratio(source, pair)
        if ratio is None:
            return None
        aux, last = (f"{k} {list(source.values[k].shape)}" for k in (pair.aux, pair.last))
        if ratio == 1:
            return (f"{aux} is as wide as {last}: the names decide",)
        if ratio < 1 and ratio:
            return (f"the names say so, but {last} is {1 / ratio:g} times as wide as {aux}",)
        return (f"{aux} is {ratio:g} times as wide as {last}",)

    return fits


def _read_pair(pair: Pair) -> Callable[[Source], Content]:
    def read(source: Source) -> Content:
        path = source.path
        ids = token_ids(source, "input_ids", batch=True)
        mask = loss_mask(source, batch=True) if "loss_mask" in source.values else None
        last, last_shape = rows(source, pair.last, 2)
        check_states(path, pair.last, last_shape, last.dtype, len(ids))
        width, notes = last_shape[1], [UNNAMED, pair.about_final, *pair.notes]
        if tensor(source, pair.aux).shape == (0,):
            # Model-Optimizer's vLLM dump of a single layer: an empty tensor in place of the aux states.
            names, readers = (), {}
            notes[0] = f"{pair.aux} is empty: only the last state was captured"
        else:
            aux, shape = rows(source, pair.aux, 2)
            check_states(path, pair.aux, shape, aux.dtype, len(ids))
            _check_widths(source, pair, shape[1], width)
            k = shape[1] // width
            if k == 1:
                notes.append(
                    f"{pair.aux} and {pair.last} are equally wide: their names alone say which is the last"
                )
            names = tuple(Stored(i) for i in range(k))
            readers = {n: _block(aux, n.index * width, width) for n in names}
        readers[FINAL] = _block(last, 0, width)
        return Content(pair.name, ids, mask, names, readers, width, pair.final_kind, tuple(notes))

    return read


def _check_widths(source: Source, pair: Pair, aux: int, last: int) -> None:
    if last > aux:
        likely = [p.name for p in PAIRS if p.aux == pair.last]
        raise CaptureError(
            source.path, f"{pair.last}, {pair.aux}",
            expected=f"{pair.aux} the wider one, as {pair.name} names them",
            found=f"{pair.last} of width {last} and {pair.aux} of width {aux}: the names are swapped",
            remedy=f"rename the two: {' or '.join(likely) or 'no framework'} calls aux states {pair.last}",
        )  # fmt: skip
    if aux % last:
        raise CaptureError(
            source.path, pair.aux, expected=f"a whole multiple of {last}, the width of {pair.last}",
            found=f"width {aux}",
            remedy="the two states are of different targets, or the file was cut: recapture",
        )  # fmt: skip


def _block(value: Value, start: int, width: int) -> Callable[[], Tensor]:
    """Reads columns start .. start + width of [L, W] or [1, L, W], as (L, width)."""
    columns = slice(start, start + width)
    index = (slice(None), columns) if len(value.shape) == 2 else (0, slice(None), columns)
    return lambda: value.read(index)


# ---- the table --------------------------------------------------------------------------------


def _no_shapes(_source: Source) -> tuple[str, ...]:
    return ()


def _fits_stack(source: Source) -> tuple[str, ...] | None:
    shape = source.values["hidden_states"].shape
    return (f"hidden_states {list(shape)}: positions, states, width",) if shape and len(shape) == 3 else None


def _fits_legacy(source: Source) -> tuple[str, ...] | None:
    parts = source.values["hidden_states"].parts
    return (f"hidden_states is a list of {len(parts)}",) if parts is not None else None


_PAIR_MAY = {
    "specforge": {},
    "modelopt": {"loss_mask": "", "conversation_id": ""},
    "angelslim": {
        "attention_mask": "not read: a conversation of its own has no padding",
        "position_ids": "not read: positions are counted from 0 (the writer stores them for images)",
        "inputs_embeds": "not read: where an image stood, the draft's embedding of its token is another one",
    },
    "baldeagle": {},
}
LAYOUTS: dict[str, Layout] = {
    "speculators-legacy": Layout(
        frozenset({"input_ids", "loss_mask", "hidden_states"}), {}, _fits_legacy, _read_legacy
    ),
    "speculators": Layout(frozenset({"hidden_states", "token_ids"}), {}, _fits_stack, _read_stack),
    "workbook": Layout(frozenset(), {}, _no_shapes, _read_workbook),
} | {
    p.name: Layout(
        frozenset({"input_ids", p.aux, p.last} | ({"loss_mask"} - set(_PAIR_MAY[p.name]))),
        _PAIR_MAY[p.name], _fits_pair(p), _read_pair(p),
    )
    for p in PAIRS
}  # fmt: skip
CAPTURE_FORMATS = tuple(LAYOUTS)
