"""Turning one published number into another, or saying why that cannot be done.

The identities, each exact unless its entry in `IDENTITIES` says otherwise (K drafted tokens a round,
AL acceptance length with the bonus, p_i joint and c_i conditional rate of step i):

    AL = 1 + K * rate          AL = 1 + sum p_i          p_i = c_0 * ... * c_i          c_i = p_i / p_{i-1}
    all-token accuracy = in-vocab accuracy * coverage

Sources: vLLM `v1/spec_decode/metrics.py` for the first two, SpecForge `eval/evaluator.py` for the
simulated length, Model-Optimizer `torch/speculative/utils.py` for AR; `lib/metric_table.py` has them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from lib.errors import MetricError

Values = tuple[float, ...]  # one per step, or a single number


@dataclass(frozen=True)
class Quantity:
    """Something that frameworks publish.

    Attributes:
        per_step: one value per step rather than a single number.
        unit: "ratio", or "tokens/round" where 1 is no help at all, or "accepted/round" where 0 is.
        published: under which names.
    """

    meaning: str
    per_step: bool
    unit: str
    published: str


QUANTITIES: dict[str, Quantity] = {
    "acceptance_length": Quantity(
        "tokens per verify round of a served run, bonus included", False, "tokens/round",
        "vLLM mean acceptance length, SGLang spec_accept_length, EAGLE tau",
    ),
    "acceptance_rate": Quantity(
        "accepted over drafted tokens of a served run", False, "ratio",
        "vLLM draft acceptance rate, SGLang spec_accept_rate",
    ),
    "rate_with_bonus": Quantity(
        "(accepted + rounds) over (K + 1) rounds", False, "ratio", "SGLang's older spec_accept_rate gauge",
    ),
    "model_optimizer_ar": Quantity(
        "a response's tokens over its rounds, the first one without a draft", False, "tokens/round",
        "Model-Optimizer AR",
    ),
    "joint": Quantity(
        "share of served rounds that accepted tokens 0..i", True, "ratio",
        "vLLM per-position acceptance rate, EAGLE#191's five numbers",
    ),
    "conditional": Quantity(
        "acceptance of token i given that 0..i-1 were accepted", True, "ratio", "EAGLE paper n-alpha",
    ),
    "full_acc": Quantity(
        "joint rate from every position, out-of-vocabulary targets re-labelled", True, "ratio",
        "speculators full_acc_i",
    ),
    "cond_acc": Quantity(
        "conditional rate from every position, out-of-vocabulary targets re-labelled", True, "ratio",
        "speculators cond_acc_i",
    ),
    "marginal": Quantity(
        "accuracy at step i whatever came before, out of vocabulary a miss", True, "ratio",
        "SpecForge acc_i, EAGLE acc_i, our all-token accuracy",
    ),
    "in_vocab_marginal": Quantity(
        "accuracy at step i whatever came before, out of vocabulary left out", True, "ratio",
        "SpecForge acc_i at bcb2ec2a, our in-vocab accuracy",
    ),
    "relabelled_marginal": Quantity(
        "accuracy at step i whatever came before, out-of-vocabulary targets re-labelled", True, "ratio",
        "Model-Optimizer train_acc",
    ),
    "simulated": Quantity(
        "sum of products of marginal accuracies, no bonus", False, "accepted/round",
        "SpecForge eval/simulated_acc_len",
    ),
    "tau_sim": Quantity(
        "1 + sum of joint rates from every position, out of vocabulary a miss", False, "tokens/round",
        "Automodel tau_sim",
    ),
    "overlap": Quantity(
        "expected acceptance of a sampled token, sum of min(p, q), out of vocabulary left out", True, "ratio",
        "SpecForge acceptance_rate_i",
    ),
}  # fmt: skip

NEEDS = {
    "depth": "K, the drafted tokens per round (mean of drafted / drafts if it varies)",
    "coverage": "the share of counted positions whose target token is in the draft's vocabulary",
    "response_tokens": "the tokens of a response",
}


@dataclass(frozen=True)
class Known:
    """What is known besides the values; None where it is not."""

    depth: float | None = None
    coverage: float | None = None
    response_tokens: float | None = None


@dataclass(frozen=True)
class Identity:
    """One way from one quantity to another; `assumption` is empty where it is exact."""

    source: str
    to: str
    formula: str
    apply: Callable[[Values, Known], Values]
    needs: tuple[str, ...] = ()
    assumption: str = ""


@dataclass(frozen=True)
class Converted:
    """A converted number (or one per step) and what had to be assumed."""

    value: float | Values
    assumption: str  # "exact", or "approximate: ..."
    formulas: tuple[str, ...]

    def __str__(self) -> str:
        """`2.483 (exact)`."""
        numbers = self.value if isinstance(self.value, tuple) else (self.value,)
        return f"{', '.join(f'{v:.4g}' for v in numbers)} ({self.assumption})"


def _products(v: Values, _: Known) -> Values:
    return tuple(math.prod(v[: i + 1]) for i in range(len(v)))


def _quotients(v: Values, _: Known) -> Values:
    if 0 in v[:-1]:
        raise MetricError(
            "convert", "joint", expected="rates above 0 before the last step", found=str(list(v)),
            remedy="drop the steps that nothing reached: their conditional rate is undefined",
        )  # fmt: skip
    return tuple(p / before for p, before in zip(v, (1.0, *v[:-1]), strict=True))


def _covered_products(v: Values, k: Known) -> Values:
    return tuple(p * k.coverage ** (i + 1) for i, p in enumerate(v))


def _covered(v: Values, k: Known) -> Values:
    return tuple(a * k.coverage for a in v)


EVERY_POSITION = (
    "chains start at every masked position, in a served run only where a round begins (after a miss, mostly)"
)
RELABELLED = (
    "re-labelled positions are taken to be hit as often as the others; they are usually hit less, so the "
    "truth lies above, at most at the uncorrected rate"
)
MASK_EDGES = "the two denominators differ where the loss mask begins and ends"
INDEPENDENT = "marginal accuracies are read as conditional ones, as if steps hit independently"

IDENTITIES: tuple[Identity, ...] = (
    Identity("joint", "acceptance_length", "1 + sum p_i", lambda v, k: (1 + sum(v),)),
    Identity("joint", "acceptance_rate", "sum p_i / K", lambda v, k: (sum(v) / len(v),)),
    Identity("joint", "conditional", "p_i / p_{i-1}", _quotients),
    Identity("conditional", "joint", "c_0 * ... * c_i", _products),
    Identity(
        "acceptance_length", "acceptance_rate", "(AL - 1) / K",
        lambda v, k: ((v[0] - 1) / k.depth,), ("depth",),
    ),
    Identity(
        "acceptance_rate", "acceptance_length", "1 + K * rate",
        lambda v, k: (1 + k.depth * v[0],), ("depth",),
    ),
    Identity(
        "acceptance_length", "rate_with_bonus", "AL / (K + 1)",
        lambda v, k: (v[0] / (k.depth + 1),), ("depth",),
    ),
    Identity(
        "rate_with_bonus", "acceptance_length", "(K + 1) * rate",
        lambda v, k: (v[0] * (k.depth + 1),), ("depth",),
    ),
    Identity(
        "acceptance_length", "model_optimizer_ar", "n / (1 + (n - 1) / AL)",
        lambda v, k: (k.response_tokens / (1 + (k.response_tokens - 1) / v[0]),), ("response_tokens",),
        "all responses have n tokens, and the last round's bonus is one of them",
    ),
    Identity(
        "model_optimizer_ar", "acceptance_length", "(n - 1) / (n / AR - 1)",
        lambda v, k: ((k.response_tokens - 1) / (k.response_tokens / v[0] - 1),), ("response_tokens",),
        "all responses have n tokens, and the last round's bonus is one of them",
    ),
    Identity("in_vocab_marginal", "marginal", "a_i * coverage", _covered, ("coverage",)),
    Identity(
        "marginal", "in_vocab_marginal", "a_i / coverage",
        lambda v, k: tuple(a / k.coverage for a in v), ("coverage",),
    ),
    Identity("relabelled_marginal", "marginal", "a_i * coverage", _covered, ("coverage",), RELABELLED),
    Identity("marginal", "simulated", "sum_i a_0 * ... * a_i", lambda v, k: (sum(_products(v, k)),)),
    Identity("marginal", "conditional", "a_i", lambda v, k: v, (), f"{INDEPENDENT}; {EVERY_POSITION}"),
    Identity(
        "simulated", "acceptance_length", "1 + simulated", lambda v, k: (1 + v[0],), (),
        f"{INDEPENDENT}; {EVERY_POSITION}",
    ),
    Identity("tau_sim", "acceptance_length", "tau_sim", lambda v, k: v, (), EVERY_POSITION),
    Identity("full_acc", "cond_acc", "p_i / p_{i-1}", _quotients, (), MASK_EDGES),
    Identity("cond_acc", "full_acc", "c_0 * ... * c_i", _products, (), MASK_EDGES),
    Identity(
        "full_acc", "joint", "p_i * coverage^(i+1)", _covered_products, ("coverage",),
        f"{RELABELLED}; {EVERY_POSITION}",
    ),
    Identity(
        "cond_acc", "conditional", "c_i * coverage", _covered, ("coverage",),
        f"{RELABELLED}; {EVERY_POSITION}",
    ),
    Identity(
        "full_acc", "tau_sim", "1 + sum p_i * coverage^(i+1)",
        lambda v, k: (1 + sum(_covered_products(v, k)),), ("coverage",), f"{RELABELLED}; {MASK_EDGES}",
    ),
)  # fmt: skip


def convert(
    value: float | Sequence[float],
    source: str,
    to: str,
    *,
    depth: float | None = None,
    coverage: float | None = None,
    response_tokens: float | None = None,
) -> Converted:
    """A published number as another quantity, with what had to be assumed.

    Args:
        value: a number, or one per step; ratios as fractions, not percent.
        source, to: keys of `QUANTITIES`.
        depth: K, drafted tokens per round.
        coverage: share of positions whose target token the draft can produce.
        response_tokens: n, for Model-Optimizer's AR.

    Raises MetricError when information is missing, when the numbers contradict each other, or when
    no identity leads from one to the other; the message says which.

    >>> print(convert([0.7011, 0.3695, 0.2059, 0.1255, 0.0812], "joint", "acceptance_length"))
    2.483 (exact)
    """
    route = _route(source, to)
    values = _checked(value, source, depth)
    if route is None:
        raise MetricError(
            "convert", f"{source} -> {to}", expected="quantities that an identity connects",
            found=_why_not(source, to), remedy=_instead(to),
        )  # fmt: skip
    if QUANTITIES[source].per_step and depth is None:
        depth = len(values)
    known = Known(depth, coverage, response_tokens)
    missing = [n for step in route for n in step.needs if getattr(known, n) is None]
    if missing:
        raise MetricError(
            "convert", f"{source} -> {to}", expected=" and ".join(NEEDS[n] for n in dict.fromkeys(missing)),
            found="not given", remedy=f"pass {', '.join(f'{n}=' for n in dict.fromkeys(missing))}",
        )  # fmt: skip
    for name, least, most in (("depth", 1, math.inf), ("coverage", 0, 1), ("response_tokens", 2, math.inf)):
        given = getattr(known, name)
        if given is not None and not (least <= given <= most and given > 0):
            raise MetricError(
                "convert", name, expected=f"a number in {least}..{most}, above 0", found=str(given),
                remedy=f"give {NEEDS[name]}",
            )  # fmt: skip
    for step in route:
        values = _checked(step.apply(values, known), step.to, depth)
    assumed = list(dict.fromkeys(s.assumption for s in route if s.assumption))
    return Converted(
        values if QUANTITIES[to].per_step else values[0],
        f"approximate: {'; '.join(assumed)}" if assumed else "exact",
        tuple(s.formula for s in route),
    )


@dataclass(frozen=True)
class Served:
    """What three counters of an engine say.

    Attributes:
        depth: K, drafted / drafts (a mean where it varies).
        rate: accepted / drafted.
        length: 1 + accepted / drafts.
    """

    depth: float
    rate: float
    length: float


def from_counts(drafts: int, drafted: int, accepted: int) -> Served:
    """The served metrics from an engine's counters (vLLM: num_drafts, num_draft_tokens, num_accepted_tokens).

    Raises MetricError for counts that no run can have.
    """
    if not (drafts > 0 and drafted >= drafts and 0 <= accepted <= drafted):
        raise MetricError(
            "from_counts", "counters", expected="0 < drafts <= drafted, 0 <= accepted <= drafted",
            found=f"{drafts} drafts, {drafted} drafted, {accepted} accepted",
            remedy="read the three counters over the same interval",
        )  # fmt: skip
    return Served(drafted / drafts, accepted / drafted, 1 + accepted / drafts)


def conversions(reasons: bool = False) -> pd.DataFrame:
    """Which published number can be turned into which: rows from, columns to.

    Cells: "same", "exact", "approximate", each with what it needs ("exact, needs K"); "needs
    per-position" where one number would have to become several; "impossible". With `reasons`, the
    formulas, assumptions, or the reason instead.
    """
    cell = _reason if reasons else _status
    return pd.DataFrame({to: {source: cell(source, to) for source in QUANTITIES} for to in QUANTITIES})


def _known(name: str) -> Quantity:
    if name not in QUANTITIES:
        raise MetricError(
            "convert", "quantity", expected=f"one of {list(QUANTITIES)}", found=repr(name),
            remedy="see QUANTITIES for what each framework's metric is called here",
        )  # fmt: skip
    return QUANTITIES[name]


def _route(source: str, to: str) -> tuple[Identity, ...] | None:
    """The fewest identities from one to the other, or None."""
    _known(source), _known(to)
    routes: dict[str, tuple[Identity, ...]] = {source: ()}
    queue = [source]
    for at in queue:  # breadth first: grows while it is walked
        for identity in IDENTITIES:
            if identity.source == at and identity.to not in routes:
                routes[identity.to] = (*routes[at], identity)
                queue.append(identity.to)
    return routes.get(to)


def _checked(value: float | Sequence[float], name: str, depth: float | None) -> Values:
    """The values as a tuple, if a metric of this name can have them."""
    quantity = QUANTITIES[name]
    values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)
    if not values or (len(values) > 1 and not quantity.per_step):
        raise MetricError(
            "convert", name, expected="one number per step" if quantity.per_step else "one number",
            found=f"{len(values)} of them", remedy="see QUANTITIES",
        )  # fmt: skip
    if quantity.per_step and depth is not None and depth != len(values):
        raise MetricError(
            "convert", name, expected=f"{depth} values, one per drafted token", found=f"{len(values)}",
            remedy="give as many rates as depth says, or leave depth out",
        )  # fmt: skip
    steps = math.inf if depth is None else depth
    least, most = {"ratio": (0, 1), "tokens/round": (1, 1 + steps), "accepted/round": (0, steps)}[
        quantity.unit
    ]
    if name == "tau_sim":  # counts training steps, which need not be the served depth
        most = math.inf
    slack = 1e-9  # of sums and quotients of printed numbers
    bad = [v for v in values if not least - slack <= v <= most + slack]
    if bad:
        raise MetricError(
            "convert", name, expected=f"values in {least}..{most} ({quantity.meaning})", found=str(bad),
            remedy="give ratios as fractions, and check that all numbers are of the same run",
        )  # fmt: skip
    if name == "joint" and any(b > a + slack for a, b in pairwise(values)):
        raise MetricError(
            "convert", name, expected="rates that do not rise", found=str(list(values)),
            remedy="these are conditional or marginal rates: name them so",
        )  # fmt: skip
    return values


def _why_not(source: str, to: str) -> str:
    a, b = QUANTITIES[source], QUANTITIES[to]
    if "overlap" in (source, to):
        return (
            "one is the expected acceptance of sampled tokens, the other counts greedy hits: neither the "
            "argmax nor the overlap of two distributions determines the other"
        )
    if to == "simulated":
        return "it is a product of marginal accuracies, which this number does not contain"
    if b.per_step and not a.per_step:
        return "one number cannot be split into one per step: many profiles have it"
    if to in ("full_acc", "cond_acc", "relabelled_marginal"):
        return (
            "it counts what the draft says where the target's token is out of its vocabulary; this number "
            "counts a miss there, or nothing"
        )
    if "marginal" in to:
        return "a chain is not followed after its first miss; the marginal also counts the steps after it"
    return "it starts a chain at every masked position of a text, which this number does not describe"


def _instead(to: str) -> str:
    return f"compute {to} from predictions (lib.metric_table), or ask the source for it"


def _status(source: str, to: str) -> str:
    if source == to:
        return "same"
    route = _route(source, to)
    if route is None:
        split = "cannot be split" in _why_not(source, to)
        return "needs per-position" if split else "impossible"
    # A profile brings its own K.
    needs = dict.fromkeys(
        n for s in route for n in s.needs if not (n == "depth" and QUANTITIES[source].per_step)
    )
    named = [{"depth": "K"}.get(n, n) for n in needs]
    kind = "approximate" if any(s.assumption for s in route) else "exact"
    return f"{kind}, needs {' and '.join(named)}" if named else kind


def _reason(source: str, to: str) -> str:
    if source == to:
        return "same"
    route = _route(source, to)
    if route is None:
        return f"{_status(source, to)}: {_why_not(source, to)}"
    assumed = list(dict.fromkeys(s.assumption for s in route if s.assumption))
    formulas = ", then ".join(s.formula for s in route)
    return f"{_status(source, to)}: {formulas}" + (f"; {'; '.join(assumed)}" if assumed else "")
