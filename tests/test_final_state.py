"""Pre- or post-norm by evidence: a real model's two last states, and what must stay undecided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib.acceptance import overlap
from lib.captures import FINAL, Capture, open_capture
from lib.draft import DraftForward
from lib.errors import CaptureError, MetricError
from lib.final_state import judge_final, settle_final
from lib.metric_table import target_side
from lib.metrics import trainer_targets
from lib.target_head import TargetHead
from tests.capture_writers import TAPS, WRITERS, native
from tests.support import HIDDEN, draft_and_head, tiny_llama

KINDS = ("pre_norm", "post_norm")


@pytest.fixture(scope="module")
def target():
    """A tiny Llama, its head as ours, and its last states on texts it wrote itself (greedily)."""
    model = tiny_llama()
    head = TargetHead(
        Path("tiny"),
        model.model.embed_tokens.weight.detach(),
        model.model.norm.weight.detach(),
        model.lm_head.weight.detach(),
        model.config.rms_norm_eps,
        6,
    )
    texts = []
    rng = torch.Generator().manual_seed(4)
    for _ in range(4):
        ids = torch.randint(0, 97, (6,), generator=rng)
        pre = []
        handle = model.model.norm.register_forward_hook(lambda _m, a, _o, kept=pre: kept.append(a[0][0]))
        with torch.no_grad():
            for _ in range(24):
                ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
            post = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        handle.remove()
        texts.append((ids, {"pre_norm": pre[-1], "post_norm": post}))
    return head, texts


def captures(texts, kind: str, claim: str | None = None, layout: str = "modelopt") -> list[Capture]:
    """Captures whose final state is of one kind, and who claim what `claim` says."""
    made = []
    for i, (ids, states) in enumerate(texts):
        mask = torch.arange(len(ids)) >= 6
        state = states[kind]
        path = Path(f"data_{i}.pt")
        made.append(
            Capture(path.stem, path, layout, ids, mask, (), HIDDEN, {FINAL: lambda s=state: s}, claim)
        )
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_of_a_real_model_are_told_apart(target, kind, dtype):
    """Two kinds of evidence agree, and the numbers are there with their n."""
    head, texts = target
    made = [c.with_states(lambda s: s.to(dtype)) for c in captures(texts, kind)]
    verdict = judge_final(made, head)
    assert verdict.kind == kind, verdict
    assert len(verdict.reasons) == 2 and all(kind in reason for reason in verdict.reasons), verdict
    assert verdict.numbers["rows"] == 120 and verdict.numbers["next_rows"] == 96
    right, wrong = ("next_lm_head", "next_norm_lm_head")[:: 1 if kind == "post_norm" else -1]
    assert verdict.numbers[right] > 0.9 > verdict.numbers[wrong]
    assert (verdict.numbers["unit_rms_share"] > 0.99) == (kind == "post_norm")
    assert "120 rows" in verdict.reasons[0]


@pytest.mark.parametrize("sinks, kind", [(True, "pre_norm"), (False, "post_norm")])
def test_without_a_head_the_spread_decides(rng, sinks, kind):
    """A first token thirty times as large is a residual stream; a constant RMS is a norm's work."""
    state = torch.randn(40, HIDDEN, generator=rng)
    state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True))
    state[0] *= 30 if sinks else 1
    made = captures([(torch.arange(40), {"pre_norm": state})], "pre_norm")
    verdict = judge_final(made)
    assert verdict.kind == kind and "no head given" in verdict.reasons[0]
    assert "40 rows" in verdict.reasons[0]


def test_what_stays_undecided(target, rng):
    """Few rows; a spread between the two; and a state that one kind of evidence takes for each."""
    head, texts = target
    few = [c.first(15) for c in captures(texts[:1], "post_norm")]
    assert judge_final(few, head).kind == "undecided"
    assert "15 rows are too few" in str(judge_final(few, head))
    state = torch.randn(40, HIDDEN, generator=rng)
    state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True)) * torch.linspace(1, 2, 40)[:, None]
    between = captures([(torch.arange(40), {"pre_norm": state})], "pre_norm")
    assert judge_final(between).kind == "undecided"
    # The post-norm state times ten: its RMS is no norm's, its next tokens are.
    scaled = [c.with_states(lambda s: 10 * s) for c in captures(texts, "post_norm")]
    verdict = judge_final(scaled, head)
    assert verdict.kind == "undecided" and "contradict" in str(verdict)


def test_long_captures_are_looked_at_in_part(target):
    """512 rows spread over a long text, the first one among them: the sink is seen, memory is bounded."""
    head, texts = target
    ids, _ = texts[0]
    state = torch.randn(5000, HIDDEN, generator=torch.Generator().manual_seed(1))
    state[0] *= 100
    (made,) = captures([(ids.repeat(200)[:5000], {"pre_norm": state})], "pre_norm")
    assert judge_final([made]).kind == "pre_norm" and judge_final([made]).numbers["rows"] == 512
    assert judge_final([made], head).numbers["next_rows"] == 256


def test_the_limit_is_kept(target):
    """Captures beyond the limit are not read."""
    head, texts = target
    made = captures(texts, "post_norm")
    made[1] = replace(made[1], readers={FINAL: lambda: pytest.fail("read beyond the limit")})
    assert judge_final(made, head, limit=1).numbers["captures"] == 1


def test_settle_fills_what_nobody_said(target):
    """The kind is filled, the note says how it was found, and the captures handed in are unchanged."""
    head, texts = target
    for kind in KINDS:
        made = captures(texts, kind)
        settled, verdict = settle_final(made, head)
        assert verdict.kind == kind and [c.final_kind for c in settled] == [kind] * 4
        assert all("judged by evidence" in c.notes[-1] for c in settled)
        assert all(c.final_kind is None for c in made)


def test_settle_keeps_a_claim_and_says_when_evidence_contradicts_it(target):
    """SpecForge says post-norm; a pre-norm state under that name is noted, not overruled."""
    head, texts = target
    settled, verdict = settle_final(captures(texts, "pre_norm", "post_norm", "specforge"), head)
    assert verdict.kind == "pre_norm" and {c.final_kind for c in settled} == {"post_norm"}
    note = "post_norm by the file or its format, but the evidence says pre_norm"
    assert all(note in c.notes[-1] for c in settled)
    sound, verdict = settle_final(captures(texts, "post_norm", "post_norm", "specforge"), head)
    assert verdict.kind == "post_norm" and not any(c.notes for c in sound)


def test_settle_judges_layouts_apart(target):
    """Two dumps of different kinds in one folder: each gets its own, and the common verdict is none."""
    head, texts = target
    mixed = captures(texts, "pre_norm") + captures(texts, "post_norm", layout="angelslim")
    settled, verdict = settle_final(mixed, head)
    assert [c.final_kind for c in settled] == ["pre_norm"] * 4 + ["post_norm"] * 4
    assert verdict.kind == "undecided" and "angelslim: post_norm" in str(verdict)


def test_settle_without_final_states(target):
    """Nothing to settle is no error; undecided leaves the kind open and says so."""
    head, texts = target
    bare = [replace(c, readers={}) for c in captures(texts, "pre_norm")]
    assert settle_final(bare, head) == (bare, None)
    few, verdict = settle_final([c.first(5) for c in captures(texts[:1], "pre_norm")], head)
    assert verdict.kind == "undecided" and few[0].final_kind is None and "too few" in few[0].notes[-1]


def test_refusals(target):
    """No final state; another width; and logits of a state of which nobody said what it is."""
    head, texts = target
    (made,) = captures(texts[:1], "post_norm")
    with pytest.raises(CaptureError, match=r"data_0\.pt: final: expected a final state to judge, found none"):
        judge_final([replace(made, readers={})], head)
    with pytest.raises(CaptureError, match=r"data_0\.pt: final: expected states of width 32, .* found 16"):
        judge_final([replace(made, hidden_size=16)], head)
    with pytest.raises(
        CaptureError, match=r"data_0\.pt: final_kind: expected pre_norm or post_norm, found None"
    ):
        made.known_final_kind()
    for kind in (None, "", "normed"):
        with pytest.raises(MetricError, match="final_kind: expected pre_norm or post_norm, found"):
            head.logits(made.final(), final_kind=kind)


def test_every_user_of_the_final_state_refuses_an_unknown_kind(tmp_path, rng):
    """No number may rest on a norm that nobody decided on: the error names the capture."""
    _, draft, head = draft_and_head(tmp_path, rng)
    path = WRITERS["modelopt-hf"].write(tmp_path, native(rng))
    made = open_capture(path, taps=TAPS)
    contract = draft.contract.change(taps=TAPS)
    for use in (
        lambda c: trainer_targets([c], draft, head),
        lambda c: target_side([c], draft, head),
        lambda c: overlap(DraftForward(draft), [c], head, contract),
    ):
        with pytest.raises(CaptureError, match=r"conversation-0000\.pt: final_kind: .* found None"):
            use(made)
        use(replace(made, final_kind="post_norm"))


def sunk(states):
    """As a large model's: even rows, and a first token that stands out many times over."""
    even = states / states.pow(2).mean(-1, keepdim=True).sqrt()
    return torch.cat([20 * even[:1], even[1:]])


@pytest.mark.parametrize("with_head", [True, False])
def test_a_folder_that_mixes_both_kinds_is_undecided(target, with_head):
    """Model-Optimizer writes either kind under one key: the first files say nothing of the rest."""
    head, texts = target
    post, pre = (captures(texts * 3, kind) for kind in KINDS[::-1])
    if not with_head:  # the spread alone is judged, and a tiny model's says nothing clearly
        post = [c.with_states(lambda s: s / s.pow(2).mean(-1, keepdim=True).sqrt()) for c in pre]
        pre = [c.with_states(sunk) for c in pre]
    head = head if with_head else None
    assert [settle_final(part, head)[1].kind for part in (post, pre)] == ["post_norm", "pre_norm"]
    settled, verdict = settle_final(post + pre, head)
    assert verdict.kind == "undecided"
    assert "post_norm in 4 (such as data_0), pre_norm in 4" in str(verdict)
    assert {c.final_kind for c in settled} == {None}
