"""From host to device: what a GPU needs so that it never waits for a file, nor the host for the GPU.

`staged` reads the states of the next batch while the current one is computed: one thread reads (captures
are mapped from disk) and copies into page-locked host memory, a side stream sends, and the computing stream
waits for an event on the device. `send` is for the small tables that the host works out. `batch_pairs_for`
packs as many pairs into a batch as fit. On the CPU all of them do nothing.

Axes: N pairs of a batch, Ht target hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lib.taps import Stored, Tap

if TYPE_CHECKING:  # lib.draft itself imports this module
    from lib.captures import Capture
    from lib.checkpoints import Draft
    from lib.contract import Contract
    from lib.draft import Batch, DraftForward

BATCH_PAIRS = 4096  # pairs per batch on a CPU: large enough for the matrix library, small in memory
MOST_PAIRS = 32_768  # on a GPU: two batches' states lie in locked memory
FREE_SHARE = 0.6  # of the free memory; the rest is for padding, workspaces of kernels and fragmentation


def send(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device. To a GPU it goes through page-locked memory, and the host does not wait for it."""
    if device.type != "cuda" or x.device.type == "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def batches_for(
    forward: DraftForward,
    captures: Sequence[Capture],
    contracts: Sequence[Contract],
    depths: int = 1,
    *,
    every: bool = False,
    batch_pairs: int | None = None,
) -> Iterator[Batch]:
    """`forward.batches` for work under these contracts: as large as suits the device, states sent ahead.

    To be used one after the other: on a GPU a batch is emptied when the next one is asked for (`staged`).
    """
    reads = {
        (i, tap, c.fc_input_norm)
        for c in contracts
        for i, tap in enumerate(c.taps if c.use_fc else c.taps[-1:])
    }
    taps = sorted({tap for _, tap, _ in reads}, key=str)
    if batch_pairs is None:
        work = {
            "longest": max(map(len, captures), default=0), "taps": len(taps), "products": len(reads),
            "embeds": len({(c.token_shift, c.embed_scale) for c in contracts}), "depths": depths,
        }  # fmt: skip
        batch_pairs = batch_pairs_for(forward.device, forward.draft, sum(map(len, captures)), **work)
    return staged(forward.batches(captures, every, batch_pairs), taps, forward.device)


# ---- states ahead of their use --------------------------------------------------------------------


def staged(
    batches: Iterable[Batch],
    taps: Sequence[Tap | Stored],
    device: torch.device,
    threaded: bool | None = None,
) -> Iterator[Batch]:
    """The same batches in the same order, each with its states at `taps` on the device already.

    A batch is over when the next one is asked for: its caches are emptied then, so that no more than two
    batches' states exist. What the reading thread raises is raised here, when that batch's turn comes. The
    thread ends with the iterator, whether that is used up, closed or dropped.

    Args:
        batches: made one at a time, in the caller's thread.
        taps: states to read; others are still read when they are asked for.
        threaded: whether to read ahead; by default where the device is a GPU.
    """
    if not (device.type == "cuda" if threaded is None else threaded):
        yield from batches
        return
    source, reader = iter(batches), _Reader(taps, device)
    with ThreadPoolExecutor(1, thread_name_prefix="states") as thread:

        def begin(turn: int, done) -> tuple[Batch, Future] | None:
            batch = next(source, None)
            return None if batch is None else (batch, thread.submit(reader.read, batch, turn, done))

        ahead, turn, done = begin(0, None), 0, None
        while ahead:
            batch, reading = ahead
            reading.result()()
            turn += 1
            ahead = begin(turn, done)
            yield batch
            for cache in (batch.states, batch.products, batch.embeds):
                cache.clear()
            del batch, reading
            done = reader.computed()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies run on; one a device, as torch keeps freed memory apart by stream."""
    return torch.cuda.Stream(device)


class _Reader:
    """Reads a batch's states into host memory and sends them; two batches take turns in that memory."""

    def __init__(self, taps: Sequence[Tap | Stored], device: torch.device) -> None:
        self.taps, self.device = taps, device
        self.stream = side_stream(device) if device.type == "cuda" else None
        self.rooms: tuple[dict, dict] = ({}, {})  # tap -> bytes, of the even and of the odd batches

    def computed(self):
        """An event behind all that was asked of the device so far; None on a CPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read(self, batch: Batch, turn: int, done) -> Callable[[], None]:
        """Fill `batch.states`, in the reading thread. Returns: what the computing thread has to call first.

        Args:
            turn: number of the batch; even and odd ones have each their memory.
            done: event after which this turn's memory, used two batches ago, is free again.
        """
        if done is not None:
            done.synchronize()  # this thread waits; without it a fast host would read any number ahead
        if self.stream is None:
            batch.states.update({tap: self._state(batch, tap, turn) for tap in self.taps})
            return lambda: None
        with torch.cuda.stream(self.stream):
            batch.states.update({tap: self._state(batch, tap, turn) for tap in self.taps})
            sent = self.stream.record_event()

        def hand_over() -> None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(sent)
            for state in batch.states.values():
                state.record_stream(computing)  # or its memory could be given away while still read

        return hand_over

    def _state(self, batch: Batch, tap: Tap | Stored, turn: int) -> Tensor:
        """(N, Ht) in the working dtype. A narrower stored dtype travels as it is and is cast on arrival."""
        parts = [batch.captures[i].state(tap)[:-1] for i in batch.indices]
        kinds, working = {p.dtype for p in parts}, batch.forward.dtype
        kind = kinds.pop() if len(kinds) == 1 else working
        room = self._room(tap, turn, parts, kind if kind.itemsize < working.itemsize else working)
        start = 0
        for part in parts:
            room[start : start + len(part)] = part
            start += len(part)
        return room.to(self.device, non_blocking=True, copy=True).to(working)

    def _room(self, tap: Tap | Stored, turn: int, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        shape = (sum(map(len, parts)), parts[0].shape[1])
        rooms, size = self.rooms[turn % 2], shape[0] * shape[1] * dtype.itemsize
        if tap not in rooms or len(rooms[tap]) < size:
            rooms[tap] = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
        return rooms[tap][:size].view(dtype).view(shape)


# ---- how much goes into a batch -------------------------------------------------------------------


def bytes_per_pair(
    draft: Draft, *, longest: int, taps: int, products: int, depths: int, embeds: int = 1
) -> int:
    """Device bytes that a pair adds to the peak of `DraftForward.run`, as if every pair were scored.

    Counted by shapes; what kernels take for themselves is not in it, nor the blocks of logits and of chain
    scores, whose size does not depend on the number of texts (scores of one text of many thousand tokens can
    be larger than `draft.SCORE_BYTES` all the same).

    Args:
        longest: L, tokens of the longest text.
        taps: states read by the contracts of the batch; products: different (slot, tap, norm) products.
        embeds: different shares of the embeddings (token shift, scale).
        depths: D.
    """
    layer, h, layers = draft.layers[0], draft.hidden_size, len(draft.layers)
    size, wide = draft.norm.element_size(), max(4, draft.norm.element_size())
    if layer.latent is None:
        groups, key, value = draft.kv_heads, draft.head_dim, draft.head_dim
        q_in, kv_in = draft.heads * key, groups * (key + value)
    else:
        m = layer.latent
        groups, key, value = draft.heads, m.nope + m.rotary, m.value
        q_in, kv_in = (m.q if m.q_a is None else m.q_a).shape[0], m.kv_a.shape[0]
    inner = layer.gate.shape[0]
    target = h if draft.fc is None else draft.fc.shape[1] // draft.n_slots
    q, kv, mixed = draft.heads * key, groups * (key + value), draft.heads * value
    # Two batches' states; products of `fc`; the embeddings' share; keys and values of pairs and chains.
    held = 2 * taps * target + products * h + embeds * (q_in + kv_in) + layers * depths * kv
    # Causal attention: heads, their padded copies, again with every key head repeated, the result; the mask.
    causal = 2 * q + 3 * kv + 2 * draft.heads * (key + max(key, value)) + 3 * mixed
    mask = longest * (1 + size)
    # A chain: its keys and values side by side, and once more in the order of the product.
    chains = 2 * q + 2 * (depths - 1) * kv + 3 * mixed if depths > 1 else 0
    # The MLP: gate and up, the activation and their product.
    mlp = 2 * h + 4 * inner
    norms = 3 * h * wide  # RMSNorm's statistics are wide
    return size * (held + 3 * h + max(causal, chains, mlp)) + mask + norms


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody holds, that which torch keeps for reuse included."""
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved


def batch_pairs_for(device: torch.device, draft: Draft, total: int, **work: int) -> int:
    """Pairs to put into a batch: a constant on a CPU, what fits on a GPU.

    There a power of two, so that a little more free memory does not change shapes and with them roundings;
    and no more than a quarter of the work, so that there is something to read ahead.

    Args:
        total: tokens of all texts.
        work: as `bytes_per_pair` takes it.
    """
    if device.type != "cuda":
        return BATCH_PAIRS
    room = int(FREE_SHARE * free_bytes(device)) // bytes_per_pair(draft, **work)
    return max(1, min(MOST_PAIRS, 1 << max(0, room.bit_length() - 1), max(BATCH_PAIRS, total // 4)))
