"""Acceptance: from offline predictions to rounds, tokens per round and tokens per second.

A *round* drafts `depth` tokens, lets the target check them in one pass, keeps those before the
first miss and adds the target's own next token (the *bonus*). Tokens per round, the acceptance
length, counts the bonus here, always.

Greedy speculation can be replayed without a target: the text is what the target wrote, so a draft
token is accepted exactly when it equals the text. `rollouts` drafts a chain from every position at
once; `walk` jumps through them as a live run does.

Axes: S scored pairs, D depths, R rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from lib.captures import FINAL, Capture
from lib.contract import Contract
from lib.draft import DraftForward, Predictions
from lib.errors import MetricError
from lib.metrics import per_conversation, ratio
from lib.target_head import TargetHead


@dataclass(frozen=True)
class Rounds:
    """Rounds of speculation, one row each.

    Attributes:
        capture: (R,) which conversation.
        start: (R,) t; the round's first draft token is predicted from the pair (g_t, x_{t+1}).
        accepted: (R,) draft tokens that entered the text.
        gained: (R,) tokens that entered the text: accepted + 1, or less where the text ends.
        depth: draft tokens proposed in every round.
    """

    capture: Tensor
    start: Tensor
    accepted: Tensor
    gained: Tensor
    depth: int

    def __len__(self) -> int:
        """R."""
        return len(self.accepted)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a round adds, bonus included."""
        return int(self.gained.sum()) / len(self)

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """(D,) rounds in which the i-th draft token was accepted; over len(self): joint rates."""
        return tuple(int((self.accepted > i).sum()) for i in range(self.depth))

    def interval(self) -> tuple[float, float]:
        """95 % interval of 1 + accepted / rounds, conversations resampled."""
        n = int(self.capture.max()) + 1
        rounds = per_conversation(torch.ones_like(self.accepted), self.capture, n)
        rate = ratio("accepted per round", per_conversation(self.accepted, self.capture, n), rounds)
        return 1 + rate.low, 1 + rate.high

    def of(self, capture: int) -> list[int]:
        """Accepted counts of one conversation, in order."""
        return self.accepted[self.capture == capture].tolist()


def rollouts(
    forward: DraftForward, captures: Sequence[Capture], contract: Contract | None = None, depth: int = 15
) -> Predictions:
    """A greedy chain of `depth` draft tokens from every scored position, its own tokens fed back."""
    return forward.predict(captures, contract, depths=depth, feed="own")


def walk(p: Predictions, captures: Sequence[Capture], depth: int | None = None) -> Rounds:
    """The rounds of a greedy run over the captures' own texts.

    The first token after the prompt comes from the target's prefill; the first round starts there.
    A round that reaches the end of the text gains only what is left of it.

    Args:
        p: from `rollouts`, on the same captures.
        depth: draft tokens a round; at most (and by default) the depth of `p`.

    Raises MetricError for depths that were not predicted, or texts that are not one answer.
    """
    depth = p.hit.shape[1] if depth is None else depth
    if not 1 <= depth <= p.hit.shape[1]:
        raise MetricError(
            "walk", "depth", expected=f"1 to {p.hit.shape[1]}, the depths predicted", found=str(depth),
            remedy="roll out deeper: rollouts(..., depth=...)",
        )  # fmt: skip
    leading = p.hit[:, :depth].int().cumprod(1).sum(1)  # (S,) hits before the first miss
    rows = []
    for i, capture in enumerate(captures):
        mine = (p.capture == i).nonzero().flatten()
        if not len(mine):
            continue
        hits = dict(zip(p.position[mine].tolist(), leading[mine].tolist(), strict=True))
        t, last = int(p.position[mine[0]]), len(capture) - 1
        gaps = set(range(t, last - 1)) - hits.keys()
        if gaps:
            raise MetricError(
                capture.path, "loss_mask", expected="one answer, from its first token to the end",
                found=f"position {min(gaps)} is not scored", remedy="walk each turn as a capture of its own",
            )  # fmt: skip
        while t + 1 < last:
            left = last - (t + 1)  # tokens of the text not yet there
            accepted = min(hits[t], left)
            gained = min(accepted + 1, left)
            rows.append((i, t, accepted, gained))
            t += gained
    if not rows:
        raise MetricError(
            "walk", "captures", expected="an answer of two tokens or more", found="none",
            remedy="use longer texts",
        )  # fmt: skip
    return Rounds(*torch.tensor(rows).T, depth)


@torch.inference_mode()
def overlap(
    forward: DraftForward,
    captures: Sequence[Capture],
    head: TargetHead,
    contract: Contract | None = None,
    *,
    depths: int = 1,
    temperature: float = 1.0,
) -> tuple[Predictions, Tensor]:
    """Expected acceptance under sampling: sum over tokens of min(p, q) at every position and depth.

    p is the target's distribution, from its head and the captured final state; q is the draft's. A
    token drawn from q is accepted with probability sum(min(p, q)) (Leviathan et al. 2023, section
    3.2); p keeps its full vocabulary, so what the draft cannot say counts as rejected.

    Returns: teacher-fed predictions and (S, D) probabilities; NaN past the end of the text.
    """
    if temperature <= 0:
        raise MetricError(
            "overlap", "temperature", expected="above 0", found=str(temperature),
            remedy="at temperature 0 count hits: walk(), or Predictions.hit",
        )  # fmt: skip
    contract = contract or forward.draft.contract
    produced = forward.draft.to_target(torch.arange(forward.draft.draft_vocab), contract.vocab_map)
    # Under a wrong map draft ids may share a target id, or be clamped to one (as in a live run).
    said, slot = produced.clamp(0, head.lm_head.shape[0] - 1).unique(return_inverse=True)
    predictions, parts = [], []
    for i, capture in enumerate(captures):
        p = forward.predict([capture], contract, depths=depths, keep_logits=True)
        drawn_from = (p.logits.float() / temperature).softmax(-1)  # (s, D, Vd)
        q = drawn_from.new_zeros(*p.truth.shape, len(said)).index_add_(-1, slot, drawn_from)
        final = capture.state(FINAL)
        shares = torch.full(p.truth.shape, float("nan"))
        for depth in range(depths):
            inside = p.truth[:, depth] >= 0
            states = final[p.position[inside] + 1 + depth]  # predicts x_{t+2+depth}
            for rows, at in zip(states.split(256), inside.nonzero().flatten().split(256), strict=True):
                logits = head.logits(rows, final_kind=capture.known_final_kind()) / temperature  # (n, V)
                target = logits.softmax(-1)[:, said]
                shares[at, depth] = torch.minimum(target, q[at, depth]).sum(-1)
        predictions.append((torch.full_like(p.position, i), p))
        parts.append(shares)
    columns = [torch.cat([owner for owner, _ in predictions])]
    columns += [
        torch.cat([getattr(p, name) for _, p in predictions])
        for name in ("position", "draft_ids", "target_ids", "truth", "in_vocab")
    ]
    return Predictions(*columns, contract=contract), torch.cat(parts)


# ---- from tokens per round to tokens per second -------------------------------------------------


def tokens_per_second(tokens_per_round: float, round_seconds: float) -> float:
    """Speed of a speculating deployment."""
    return tokens_per_round / round_seconds


def break_even(round_seconds: float, plain_seconds: float) -> float:
    """Tokens per round (bonus included) below which speculation is slower than none."""
    return round_seconds / plain_seconds


def independent_chain(p: float, depth: int) -> float:
    """Tokens per round if every draft token were accepted with probability p: 1 + p + ... + p^depth.

    An upper estimate from a depth-0 accuracy: real acceptance falls with depth.
    """
    return sum(p**i for i in range(depth + 1))


@dataclass(frozen=True)
class Costs:
    """Measured seconds of the parts of a round.

    Attributes:
        plain: one target pass over one token, as plain decoding makes it.
        verify: new tokens in the pass (depth + 1) -> seconds.
        draft: depth -> seconds of extending the draft's cache and proposing that many tokens.
    """

    plain: float
    verify: Mapping[int, float]
    draft: Mapping[int, float]

    def round(self, depth: int) -> float:
        """Seconds of one round at this depth."""
        return self.draft[depth] + self.verify[depth + 1]

    def table(self, depths: Sequence[int]) -> pd.DataFrame:
        """Milliseconds of a round and of its parts, and the break-even, one column per depth."""
        rows = {
            d: [
                1e3 * self.round(d),
                1e3 * self.verify[d + 1],
                1e3 * self.draft[d],
                self.round(d) / self.plain,
            ]
            for d in depths
        }
        names = ["round, ms", "of it target pass", "of it draft", "break-even tokens"]
        plain = f"draft tokens (plain step {1e3 * self.plain:.1f} ms)"
        return pd.DataFrame(rows, index=names).rename_axis(columns=plain).round(1)


def speed_table(p: Predictions, captures: Sequence[Capture], costs: Costs) -> pd.DataFrame:
    """Predicted speed at every depth that was measured and rolled out.

    Columns: tokens per round (bonus included), round in plain steps (the break-even), tok/s, ratio to plain.
    """
    rows = []
    for depth in sorted(set(costs.draft) & set(range(1, p.hit.shape[1] + 1))):
        gain, seconds = walk(p, captures, depth).tokens_per_round, costs.round(depth)
        rows.append(
            {
                "depth": depth,
                "tokens per round": gain,
                "break-even": break_even(seconds, costs.plain),
                "tok/s": tokens_per_second(gain, seconds),
                "ratio": tokens_per_second(gain, seconds) * costs.plain,
            }
        )
    return pd.DataFrame(rows).set_index("depth")


def best_depth(table: pd.DataFrame) -> int:
    """The depth with the highest predicted speed."""
    return int(table["tok/s"].idxmax())


# ---- the incident's first confounder ---------------------------------------------------------


@dataclass(frozen=True)
class Flags:
    """SGLang's speculation flags as typed, and what its rule makes of them.

    Attributes:
        steps: `--speculative-num-steps`, draft passes in a round.
        topk: `--speculative-eagle-topk`, branches at each step.
        draft_tokens: `--speculative-num-draft-tokens` as typed, tokens the target checks in a round.
    """

    steps: int
    topk: int
    draft_tokens: int

    def __post_init__(self) -> None:
        """Refuse values no engine accepts."""
        for name in ("steps", "topk", "draft_tokens"):
            if getattr(self, name) < 1:
                raise MetricError(
                    "flags", name, expected="1 or more", found=str(getattr(self, name)),
                    remedy="speculation needs at least one step, one branch and one draft token",
                )  # fmt: skip

    @property
    def effective(self) -> int:
        """Tokens the target really checks in a round, the last accepted one included.

        With top-k 1 the draft is a chain, and SGLang sets the number to steps + 1 whatever was
        typed (`server_args.py`: a warning in the log, no error). With more branches the typed
        number stands.
        """
        return self.steps + 1 if self.topk == 1 else self.draft_tokens

    @property
    def chain_depth(self) -> int:
        """Draft tokens in a round: one of the checked tokens is not the draft's."""
        return self.effective - 1

    @property
    def overridden(self) -> bool:
        """Whether the engine runs with another number than the one typed."""
        return self.effective != self.draft_tokens
