"""Probes of what was learned and of what is predicted: final states, text, training targets.

P8 is the probe of the formats reference, section B.0. Axes: L positions, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import t as student
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.case import Finding
from lib.draft import DraftForward
from lib.final_state import judge_final
from lib.probing import Seen, View, probe, share
from lib.taps import Tap

TARGET_TEXTS = 10  # captures on which the draft is compared with inner states
LIVE_FILES = 32  # files recomputed by the live target
OWN_TEXT = 0.7  # the target's first choice must be the next token at least so often
OPENING = 8  # tokens of an answer
MIN_OPENINGS = 4  # answers that show a spread
SURPRISED = 0.5  # nats a token by which they surprise more than the rest; about 0 in text of its own
SHUFFLED = 0.35  # below that the text is no text
MARGIN = 0.02  # agreement with an inner state must beat the text's by that


def _agreement(view: View, states: Sequence[Tensor], kind: str) -> tuple[int, int]:
    """(hits, n): how often the head's first choice on these states is the next token of the answer."""
    at, truth = view.next_tokens
    hits = 0
    for x, r, ids in zip(states, at, truth, strict=True):
        hits += view.agreed(x, r, ids, kind)
    return hits, sum(map(len, truth))


@probe("final", "captures", "fits", "final")
def final(view: View) -> Seen:
    """Final states: pre- or post-norm, of the last block, and does the text follow them? (P8)."""
    captures, head = view.finals, view.case.head
    if not captures:
        yield "the final states cannot be judged: none is of a sound text with a scored position"
    if not captures or view.stop:
        return
    claim = captures[0].final_kind
    verdict = judge_final(captures, head)
    if verdict.kind != "undecided" and claim is not None and verdict.kind != claim:
        kind = "final_unnormed" if claim == "post_norm" else "final_normed_twice"
        yield Finding(kind, "final", "final_kind", claim, verdict.kind, verdict.reasons)
    kind = verdict.kind if verdict.kind != "undecided" else claim
    if kind is None:
        yield f"the final state's kind is undecided: {'; '.join(verdict.reasons)}"
        return
    hits, n = _agreement(view, [c.final() for c in captures], kind)
    same = [t for t in view.taps if all(torch.equal(c.state(t), c.final()) for c in captures)]
    text = f"the head's first choice on the final state is the next token in {share(hits, n)} (n = {n})"
    true = None
    if view.case.live is not None:
        last = Tap(view.case.live.model.config.num_hidden_layers)
        true = _agreement(view, [view.recomputed(c, (last,))[last] for c in captures], "pre_norm")[0]
        text += f", on the live target's in {share(true, n)}"
    last_layer = Tap(head.n_layers)
    if same and same[0] != last_layer:
        inner = same[0]
        yield Finding(
            "final_early" if inner == Tap(head.n_layers - 1) else "final_is_slot", "final", "final state",
            str(inner), str(last_layer), (f"it equals the stored state {inner} bit by bit", text),
        )  # fmt: skip
    elif true is not None and hits < true - 0.02 * n:
        near = _nearest(view, captures[0])
        kind = "final_early" if near == Tap(head.n_layers - 1) else "final_is_slot"
        yield Finding(kind, "final", "final state", str(near), str(last_layer), (text,))
    elif true is None and hits < OWN_TEXT * n:
        yield text + ": either the text is not the target's own, or this is not its last state"


def _nearest(view: View, capture: Capture) -> Tap:
    last = view.case.live.model.config.num_hidden_layers
    states, x = view.recomputed(capture, [Tap(i) for i in range(last + 1)]), capture.final().float()
    return min(states, key=lambda t: float((x - states[t]).norm() / states[t].norm()))


@probe("text", "captures", "live")
def text(view: View) -> Seen:
    """Is the text the target's own? Its first choice against the next token, recomputed (P8, fault 34)."""
    hits = n = 0
    surplus = []
    model = view.case.live.model
    for capture in [c for c in view.own_ids if c.loss_mask[1:].any()][:LIVE_FILES]:
        at = capture.loss_mask[1:].nonzero().flatten()
        with torch.inference_mode():
            x = model.model(input_ids=capture.token_ids[None], use_cache=False).last_hidden_state[0, at]
            log_p = model.lm_head(x).float().log_softmax(-1)  # (n, V)
        hits += int((log_p.argmax(-1) == capture.token_ids[at + 1]).sum())
        n += len(at)
        # Text drawn from a model is on average as surprising as its entropy, first choices are less so, both
        # alike at the beginning and later on. A foreign answer surprises at its beginning only: what
        # follows is predicted well from that.
        surprise = -log_p.gather(1, capture.token_ids[at + 1, None])[:, 0] + (log_p.exp() * log_p).sum(-1)
        if len(at) >= 2 * OPENING:
            surplus.append(float(surprise[:OPENING].mean() - surprise[OPENING:].mean()))
    if not n:
        yield "whose text it is cannot be judged: no position of a whole text is scored"
    if n and hits < OWN_TEXT * n:
        yield Finding(
            "text_shuffled" if hits < SHUFFLED * n else "text_of_others", "text", "answers",
            "not the target's own", "written by the target",
            (f"the target's first choice is the next token in {share(hits, n)} (n = {n}); "
             f"in text of its own that is {100 * OWN_TEXT:.0f} % or more",),
        )  # fmt: skip
    elif len(surplus) >= MIN_OPENINGS:
        gain = torch.tensor(surplus, dtype=torch.float64)
        value, spread = float(gain.mean()), max(float(gain.std()), 0.1)
        p_value = float(student.sf(value / (spread / len(gain) ** 0.5), len(gain) - 1))
        if value > SURPRISED and p_value < 0.01:
            yield Finding(
                "text_of_others", "text", "answers", "not the target's own", "written by the target",
                (f"the first {OPENING} tokens of {len(gain)} answers surprise the target by {value:.2f} nats "
                 f"a token more than what follows them, its own entropy subtracted (p = {p_value:.2g}); "
                 f"its first choice is the next token in {share(hits, n)} (n = {n})",),
                p_value=p_value,
            )  # fmt: skip


@probe("targets", "captures", "fits", "final")
def targets(view: View) -> Seen:
    """Does the draft say what the head makes of an inner state, not what the text says? (P8, fault 6)."""
    draft, head = view.case.draft, view.case.head
    captures = [c for c in view.judged if FINAL in c.readers and c.name not in view.off]
    contract = draft.contract
    inner = (
        [t for t in view.taps if isinstance(t, Tap) and 0 < t.after_block < head.n_layers] if captures else []
    )
    if (
        not inner
        or view.stop
        or len(captures) < 4
        or any(t not in c.readers for c in captures for t in contract.taps)
    ):
        return
    captures = captures[:TARGET_TEXTS]
    rows = draft.to_target(torch.arange(draft.draft_vocab), contract.vocab_map).clamp(
        0, len(head.lm_head) - 1
    )
    p = DraftForward(draft).predict(captures, contract)
    counts = torch.zeros(len(captures), len(inner) + 2, dtype=torch.float64)
    total = 0
    for i, capture in enumerate(captures):
        mine = (p.capture == i) & p.in_vocab[:, 0]
        at, said = p.position[mine] + 1, p.draft_ids[mine, 0]
        total += len(at)
        counts[i, 0] = p.hit[mine, 0].sum()
        final_kind = capture.final_kind or "pre_norm"
        for k, x in enumerate(
            [(capture.final(), final_kind), *((capture.state(t), "pre_norm") for t in inner)]
        ):
            counts[i, 1 + k] = (head.logits(x[0][at], final_kind=x[1], rows=rows).argmax(-1) == said).sum()
    best = int(counts[:, 2:].sum(0).argmax())
    # Sampled text disagrees with its writer's first choice too: the inner state must beat that as well.
    gain = counts[:, 2 + best] - counts[:, :2].max(1).values
    t = float(gain.sum()) / (max(float(gain.std()), 0.5) * len(gain) ** 0.5)
    p_value = min(1.0, len(inner) * float(student.sf(t, len(gain) - 1)))
    value = [float(c) / max(1, total) for c in counts.sum(0)]
    if p_value < 0.01 and value[2 + best] > max(value[:2]) + MARGIN:
        yield Finding(
            "inner_targets", "targets", "training targets", str(inner[best]), f"layer{head.n_layers}",
            (f"the draft agrees with the head on {inner[best]} in {100 * value[2 + best]:.1f} %, with its "
             f"first choice on the final state in {100 * value[1]:.1f} %, with the text in "
             f"{100 * value[0]:.1f} % "
             f"(n = {total} in-vocab positions, {len(captures)} conversations)",),
            p_value=p_value,
        )  # fmt: skip
