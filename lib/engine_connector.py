"""Runs inside vLLM only: lets its hidden-state extraction write files on a machine without CUDA.

vLLM 0.32's `ExampleHiddenStatesConnector` copies through pinned memory and waits on CUDA events; the
CPU build has neither. Drop this file, and name that class in `lib.engine._capture_flags`, when
`_submit_async_write` upstream works on the CPU.
"""

import fcntl
import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    """Stands for a CUDA event of a copy that is finished."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The same files in the same places, written at once and by the thread that asks."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy a finished request's states out of the cache and write its file."""
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states.cpu().contiguous(), "token_ids": pending.token_ids.clone()}
        self._write_tensors(tensors, _Done(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = _Done()
