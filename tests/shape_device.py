"""torch's meta device in a GPU's place, for machines without one: what the host asks of a device, op by op.

Tensors there have a shape and a dtype and no values. So an op that would make the host wait for a GPU
(`item`, `nonzero`, `unique`, a Python `if`) cannot run at all, copies to the CPU are counted, and any other
op that mixes both devices is an error. Not covered: numbers, streams and events, page-locked memory, CUDA's
own kernels and what they allocate. (FakeTensorMode's "cuda" would be closer, but slicing its tensors needs a
build of torch with CUDA.)
"""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")


class ShapeDevice(TorchDispatchMode):
    """Watches all ops while open.

    Attributes:
        fetched: shape of every tensor that was copied from the device: on a GPU each is a wait.
        sent: number of tensors copied to it.
        live, peak: bytes of the device's tensors now, and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fetched, self.sent, self.live, self.peak = [], 0, 0, 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, leaves = kwargs or {}, tree_leaves((args, kwargs or {}))
        devices = {x.device.type for x in leaves if isinstance(x, torch.Tensor) and x.dim()}
        target = next((x.type for x in leaves if isinstance(x, torch.device)), None)
        if "meta" not in devices and target != "meta":
            return func(*args, **kwargs)
        if func.namespace == "aten":  # inference mode hands over whole functions, such as `linear`
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is torch.ops.aten._to_copy.default:
            if target == "cpu":
                self.fetched.append(tuple(args[0].shape))
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            self.sent += devices == {"cpu"}
        else:
            assert len(devices) < 2, f"{func} of tensors on both devices"
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type == "meta":
                self._count(x.untyped_storage())
        return out

    def _count(self, storage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self.known.pop(key)
