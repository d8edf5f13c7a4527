"""Measure one capture file or many: what a report over any number of files is merged from.

`evaluate_file` measures a file under a `Plan` and returns a `Part`; `evaluate_all` does so for many
files and writes each part as it is finished, so that an interrupt loses the file in flight and
nothing else, and a rerun goes on where it stopped. `merge` turns parts into `Totals`.

What a part holds, its bytes, and the keys by which it is found again are in `lib.parts`; who chooses what
to measure, in `lib.report`.

Axes: C candidates, M files, D depths, S scored pairs, L positions, R rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lib import sweep
from lib.acceptance import Rounds, rollouts, walk
from lib.arrow_masks import ArrowMasks, arrow_files
from lib.captures import FINAL, NO_MASK, Capture, name_taps, open_capture
from lib.checkpoints import load_draft
from lib.contract import Contract, Source
from lib.draft import DraftForward, Predictions
from lib.errors import CaptureError, MetricError, WorkbookError
from lib.metric_table import Evidence, TargetSide, evidence
from lib.norms import TapNorms, merge_norms, norm_statistics
from lib.parts import COLUMNS, SUMS, VERSION, Part, Rollout, digest, file_key, model_stamp, stamp
from lib.taps import Stored, Tap, parse_tap
from lib.target_head import TargetHead, load_target_head

NO_TARGET = "no target was given"
NO_FINAL = "no final state: name the last block's tap among the stored ones, or give finals="
NO_MEMORY = "can't allocate memory"  # how torch says it of the CPU's, in a plain RuntimeError
DEADLY = "KilledWorker"  # error kind of a file whose readers died
MANY_ANSWERS = "a text with several answers: served metrics are defined for one"


@dataclass(frozen=True)
class Plan:
    """What to measure in every file. Plain values only, so that another process can be handed one.

    Attributes:
        draft, target: paths; the target "" if there is none, the draft too if norms alone are wanted.
        convention: whose reading of the config's tap ids.
        names: lists of tap names; a file whose taps nobody recorded takes the list of its length.
        named: refuse files whose taps are recorded nowhere, neither in them nor in `names`.
        loss_masks, layout: as `open_folder` takes them, "" for none.
        final_kinds: pairs of layout and final kind, for files that do not say theirs.
        wirings: taps, in slot order, under which chains are rolled out.
        candidates: taps that the sweep compares.
        depth: D, draft tokens in a chain.
        norms, metrics: whether norms and the evidence of the metric table are wanted.
        device, dtype: of the draft.
    """

    draft: str
    target: str = ""
    convention: str = "vllm"
    names: tuple[tuple[str, ...], ...] = ()
    named: bool = False
    loss_masks: str = ""
    layout: str = ""
    final_kinds: tuple[tuple[str, str], ...] = ()
    wirings: tuple[tuple[str, ...], ...] = ()
    candidates: tuple[tuple[str, ...], ...] = ()
    depth: int = 15
    norms: bool = True
    metrics: bool = True
    device: str = "cpu"
    dtype: str = "float32"

    def stamps(self) -> list:
        """Of the files that are loaded once: the draft's, the target's and the loss masks'."""
        found = [model_stamp(Path(p)) for p in (self.draft, self.target) if p]
        return found + ([stamp(f) for f in arrow_files(Path(self.loss_masks))] if self.loss_masks else [])

    def fingerprint(self, stamps: list | None = None) -> str:
        """sha256 over the plan, the version of parts, and stamps (of the files as they are now if None)."""
        return digest([VERSION, asdict(self), self.stamps() if stamps is None else stamps])

    def rewired(self, contract: Contract, taps: Sequence[str]) -> Contract:
        """The draft's contract with these taps in its slots."""
        wanted = tuple(map(parse_tap, taps))
        if wanted == contract.taps:
            return contract
        return contract.change(Source("inferred", "tried by the report"), taps=wanted)


class Tools:
    """What a plan needs loaded: the draft, the target's head, loss masks. Pickles as the plan alone."""

    def __init__(self, plan: Plan) -> None:
        """Load everything; raises CheckpointError or ContractError."""
        self.plan = plan
        # Taken once, before loading: a checkpoint that is overwritten later must not lend its new name.
        self.stamps = plan.stamps()
        self.fingerprint = plan.fingerprint(self.stamps)
        self.head: TargetHead | None = load_target_head(plan.target) if plan.target else None
        self.forward: DraftForward | None = None
        if plan.draft:
            dtype = getattr(torch, plan.dtype)
            draft = load_draft(
                plan.draft, target=self.head, convention=plan.convention, device=plan.device, dtype=dtype
            )
            self.forward = DraftForward(draft)
        self.masks = ArrowMasks(Path(plan.loss_masks)) if plan.loss_masks else None

    def __reduce__(self):
        """A worker process loads the files itself."""
        return Tools, (self.plan,)

    def with_plan(self, plan: Plan) -> Tools:
        """The same draft and head for another plan over them."""
        other = object.__new__(Tools)
        other.__dict__ = {**self.__dict__, "plan": plan, "fingerprint": plan.fingerprint(self.stamps)}
        return other

    def contract(self, taps: Sequence[str]) -> Contract:
        """The draft's contract with these taps. Raises MetricError for a plan without a draft."""
        if self.forward is None:
            raise MetricError(
                "plan", "draft", expected="a draft for what is to be predicted", found="none",
                remedy="name a draft, or leave wirings and candidates empty for norms alone",
            )  # fmt: skip
        return self.plan.rewired(self.forward.draft.contract, taps)


def evaluate_file(
    path: str | Path, plan: Plan, *, final: str | Path = "", tools: Tools | None = None
) -> Part:
    """Measure one capture file.

    Args:
        path: the file.
        plan: what to measure.
        final: a capture of the same text that holds the final state, if this one does not.
        tools: the plan's, if they are loaded already.

    Returns: a part; a failed one when the file (not the draft or the target) is at fault.
    """
    tools = tools or Tools(plan)
    try:
        return _measure(Path(path), plan, Path(final) if final else None, tools)
    except (WorkbookError, OSError) as err:  # OSError: a disk or a right that fails for this file
        return Part(tools.fingerprint, str(path), Path(path).stem, str(err), type(err).__name__)
    except (RuntimeError, MemoryError) as err:
        if not isinstance(err, torch.OutOfMemoryError | MemoryError) and NO_MEMORY not in str(err):
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        said = MetricError(
            path, "memory", expected=f"room for one text on {plan.device}", found=str(err)[:200],
            remedy="cut the text shorter, ask for fewer draft tokens (depth), or use device=cpu",
        )  # fmt: skip
        return Part(tools.fingerprint, str(path), Path(path).stem, str(said), type(said).__name__)


def _measure(path: Path, plan: Plan, final: Path | None, tools: Tools) -> Part:
    capture = open_with_final(path, final, tools)
    if FINAL in capture.readers and capture.final_kind is None:
        capture = replace(capture, final_kind=dict(plan.final_kinds).get(capture.layout))
    forward = tools.forward
    norms = norm_statistics([capture]) if plan.norms else {}
    swept = None
    if contracts := [tools.contract(c) for c in plan.candidates or plan.wirings]:
        swept = sweep.sweep(forward, [capture], contracts)
        _check_finite(swept, path, plan)
        swept = swept if plan.candidates else None
    rolled, evidences, why_not = [], [], _why_no_evidence(capture, plan, tools.head)
    for taps in plan.wirings:
        contract = tools.contract(taps)
        p = rollouts(forward, [capture], contract, plan.depth)
        rolled.append(_rollout(taps, p, capture))
        if rolled[-1].answers > 1:
            why_not = why_not or MANY_ANSWERS
        if not why_not:
            evidences.append(_evidence_tensors(evidence([capture], forward.draft, tools.head, contract)))
    tokens = capture.token_ids.numpy().astype("<i8").tobytes()
    return Part(
        tools.fingerprint, str(path), capture.name, layout=capture.layout, length=len(capture),
        scored=len(capture.scored), taps=tuple(map(str, capture.taps)), notes=capture.notes,
        tokens=hashlib.sha256(tokens).hexdigest(), norms={str(t): n for t, n in norms.items()},
        hits=swept.hits[:, 0] if swept else torch.zeros(0, dtype=torch.int64),
        scores=swept.scores[:, 0] if swept else torch.zeros(0, dtype=torch.float64),
        count=int(swept.counts[0]) if swept else 0,
        rollouts=tuple(rolled), evidence=tuple(evidences), no_evidence=why_not,
    )  # fmt: skip


def _check_finite(swept: sweep.Sweep, path: Path, plan: Plan) -> None:
    """Raise MetricError for scores that are no numbers: their argmax would count as a plain miss."""
    bad = ~torch.isfinite(swept.scores[:, 0])
    if bad.any():
        taps = " ".join(map(str, swept.contracts[int(bad.nonzero()[0, 0])].taps))
        raise MetricError(
            path, "scores", expected="finite log-probabilities of the draft",
            found=f"NaN or Inf with taps {taps}, dtype {plan.dtype}, weights {plan.draft}",
            remedy="use dtype float32 (float16 overflows at 65504), or look for NaN in the weights",
        )  # fmt: skip


def open_as_planned(path: Path, tools: Tools, *, final_only: bool = False) -> Capture:
    """A capture with its states named by the plan's lists, and its final state found if it is a tap.

    The state after the target's last block is its final state before the norm (formats A.0, vLLM).
    """
    plan, layout = tools.plan, tools.plan.layout or None
    capture = open_capture(path, layout=layout)
    if tools.masks is not None and NO_MASK in capture.notes:
        capture = open_capture(path, layout=layout, loss_mask=tools.masks.of(path, capture.token_ids))
    lists = {len(names): names for names in plan.names}
    unlisted = len(capture.taps) not in lists and any(isinstance(t, Stored) for t in capture.taps)
    if not unlisted or (plan.named and not final_only):  # whoever wants the final state alone needs no names
        capture = name_taps(capture, lists)
    last = Tap(tools.head.n_layers) if tools.head else None
    if last in capture.taps and FINAL not in capture.readers:
        readers = {**capture.readers, FINAL: capture.readers[last]}
        capture = replace(capture, readers=readers, final_kind="pre_norm")
    return capture


def open_with_final(path: Path, final: Path | None, tools: Tools) -> Capture:
    """The same, with the final state of another capture of the same text joined to it."""
    capture = open_as_planned(path, tools)
    if final is None:
        return capture
    other = open_as_planned(final, tools, final_only=True)
    if FINAL not in other.readers:
        raise CaptureError(
            final, FINAL, expected="the target's final state", found="none",
            remedy="finals= names captures that hold the last state",
        )  # fmt: skip
    return capture.with_final(other)


def _why_no_evidence(capture: Capture, plan: Plan, head: TargetHead | None) -> str:
    if not plan.metrics:
        return "not asked for"
    if head is None:
        return NO_TARGET
    if FINAL not in capture.readers:
        return NO_FINAL
    return "" if capture.final_kind else "nobody knows whether the final norm is in the final state"


# ---- chains of one file -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """What `walk` asks of a capture: where a text, cut after one answer, ends."""

    path: Path
    length: int

    def __len__(self) -> int:
        return self.length


def _rollout(taps: tuple[str, ...], p: Predictions, capture: Capture) -> Rollout:
    """The chains' columns and sums; each answer of a text is walked on its own."""
    hit, reached = p.hit, p.truth >= 0
    sums = torch.zeros(len(SUMS), p.hit.shape[1], dtype=torch.int64)
    sums[:5] = torch.stack(
        [x.sum(0) for x in (hit & p.in_vocab, p.in_vocab, hit, reached, hit.int().cumprod(1))]
    )
    breaks = (p.position.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(p.position)]
    owner = torch.zeros(len(p.position), dtype=torch.int64).index_fill_(0, breaks, 1).cumsum(0)
    answers = []
    for _, stop in pairwise(bounds):
        end = int(p.position[stop - 1])  # pair `end` holds the answer's last token, at end + 1
        answers.append(_Answer(capture.path, len(capture) if end == len(capture) - 3 else end + 2))
    long_enough = any(
        int(p.position[start]) + 2 < len(a) for (start, _), a in zip(pairwise(bounds), answers, strict=True)
    )
    for depth in range(1, p.hit.shape[1] + 1) if long_enough else ():
        r = walk(replace(p, capture=owner), answers, depth)
        sums[5:, depth - 1] = torch.tensor([len(r), int(r.accepted.sum()), int(r.gained.sum())])
    small = {c: getattr(p, c).int() for c in COLUMNS[:-1]}
    return Rollout(tuple(taps), **small, in_vocab=p.in_vocab, sums=sums, answers=len(answers))


_ROUNDS = ("start", "accepted", "gained")


def _evidence_tensors(e: Evidence) -> dict[str, Tensor]:
    """The metric table's evidence of one file; ids as int32."""
    columns = {c: getattr(e.predictions, c) for c in COLUMNS}
    target = {f"target_{n}": getattr(e.target, n)[0] for n in ("full", "log_z", "draft")}
    rounds = {n: getattr(e.rounds, n) for n in _ROUNDS}
    chain, mask = torch.tensor([e.rounds.depth]), e.captures[0].loss_mask
    return {**columns, **target, **rounds, "chain": chain, "loss_mask": mask, "overlap": e.overlap}


# ---- many files ---------------------------------------------------------------------------------


def part_file(path: Path, final: Path | None, tools: Tools, work: Path) -> Path:
    """Where the finished part of a file lies; one subfolder per plan."""
    return work / tools.fingerprint[:16] / f"{path.stem}-{file_key(path, final)}.safetensors"


def evaluate_all(
    files: Sequence[tuple[Path, Path | None]],
    tools: Tools,
    work: Path,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Part]:
    """Parts of all files, in their order: from `work` where they are finished, else measured and written.

    Args:
        files: pairs of a capture and the capture that holds its final state, or None.
        tools: of the plan.
        work: folder of finished parts; one subfolder per plan.
        progress: wraps the loop, as `tqdm` does.

    A failed part is written too, and tried again by the next run: the file may have been in use. Not so one
    that killed every process which read it (`lib.cluster`).
    """
    parts = []
    for path, final in progress(files):
        stored = part_file(path, final, tools, work)
        part = Part.load(stored)
        if not finished(part, tools.fingerprint):
            part = evaluate_file(path, tools.plan, final=final or "", tools=tools)
            part.save(stored)
        parts.append(replace(part, file=str(path)))  # an earlier run may have named it by another path
    return parts


def finished(part: Part | None, plan: str, *, deadly: bool = True) -> bool:
    """Whether a stored part of this plan is to stay as it is; errors are tried again.

    Args:
        deadly: let a file rest that killed its readers: it would kill this process. Workers may try again.
    """
    if part is None or part.plan != plan:
        return False
    return not part.error or (deadly and part.error_kind == DEADLY)


@dataclass(frozen=True)
class Totals:
    """Parts of one plan put together.

    Attributes:
        parts: of files that were read, in order; failed: the others.
        norms: tap -> statistics over all files.
    """

    parts: tuple[Part, ...]
    failed: tuple[Part, ...]
    norms: dict[str, TapNorms]

    def sums(self, wiring: int, name: str) -> Tensor:
        """(M, D) one of `SUMS` per file and depth."""
        return torch.stack([p.rollouts[wiring].of(name) for p in self.parts])

    def sweep(self, contracts: Sequence[Contract]) -> sweep.Sweep:
        """All files' sums as the sweep they are; contracts in the order of the plan's candidates."""
        hits, scores = (torch.stack([getattr(p, n) for p in self.parts], 1) for n in ("hits", "scores"))
        counts = torch.tensor([p.count for p in self.parts])
        return sweep.Sweep(tuple(contracts), hits, scores, counts, torch.ones_like(hits, dtype=torch.bool))

    def predictions(self, wiring: int, contract: Contract) -> Predictions:
        """The chains of all files as one `Predictions`; `capture` counts `parts`."""
        rolled = [p.rollouts[wiring] for p in self.parts]
        return _joined([{c: getattr(r, c) for c in COLUMNS} for r in rolled], contract)

    def evidence(self, wiring: int, contract: Contract, in_vocab: Tensor) -> Evidence | None:
        """The metric table's evidence over all files that have it; None if none has."""
        parts = [p for p in self.parts if p.evidence]
        if not parts:
            return None
        found = [p.evidence[wiring] for p in parts]
        captures = tuple(
            Capture(
                p.name, Path(p.file), p.layout, torch.zeros(p.length, dtype=torch.int64), e["loss_mask"],
                tuple(map(parse_tap, p.taps)), 0, {},
            )
            for p, e in zip(parts, found, strict=True)
        )  # fmt: skip
        target = TargetSide(*(tuple(e[f"target_{n}"] for e in found) for n in ("full", "log_z", "draft")))
        owner = torch.cat([torch.full_like(e["start"], i) for i, e in enumerate(found)])
        columns = (torch.cat([e[n] for e in found]) for n in _ROUNDS)
        rounds = Rounds(owner, *columns, int(found[0]["chain"]))
        overlap = torch.cat([e["overlap"] for e in found])
        return Evidence(captures, in_vocab, _joined(found, contract), target, overlap, rounds)


def merge(parts: Iterable[Part]) -> Totals:
    """Put parts of one plan together.

    Raises MetricError for parts of different plans, or if no file could be read.
    """
    parts = list(parts)
    if len({p.plan for p in parts}) > 1:
        raise MetricError(
            "merge", "plan", expected="parts of one plan", found=f"{len({p.plan for p in parts})} plans",
            remedy="merge the parts of each plan on their own",
        )  # fmt: skip
    read = tuple(p for p in parts if not p.error)
    if not read:
        first = parts[0].error if parts else "no files"
        raise MetricError(
            "merge", "captures", expected="at least one file that can be read",
            found=f"none of {len(parts)}; the first: {first}", remedy="mend the files, or name others",
        )  # fmt: skip
    norms: dict[str, TapNorms] = {}
    for part in read:
        norms = merge_norms(norms, part.norms)
    return Totals(read, tuple(p for p in parts if p.error), norms)


def _joined(columns: Sequence[dict[str, Tensor]], contract: Contract) -> Predictions:
    owner = torch.cat([torch.full((len(c["position"]),), i) for i, c in enumerate(columns)])
    joined = {n: torch.cat([c[n] for c in columns]) for n in COLUMNS}
    wide = {n: t if t.dtype == torch.bool else t.long() for n, t in joined.items()}
    return Predictions(owner, **wide, contract=contract)
