"""One native conversation, written in every framework's capture format, by the format's own documentation.

Each writer says where its facts come from. None of them uses our readers. `WRITERS` is what other tests loop
over; a writer returns the file, and makes the subfolders that its framework makes.

Axes: L positions, H hidden size, k taps.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lib.captures import save_capture
from lib.taps import Tap
from tests.support import HIDDEN, VOCAB

TAPS = (Tap(0), Tap(3), Tap(4))
SCALES = (1.0, 30.0, 60.0)  # as uneven as real ones
LAST = Tap(6)


@dataclass(frozen=True)
class Native:
    """A made-up conversation and its states.

    Attributes:
        ids: (L,) int64.
        mask: (L,) 0 / 1 float.
        states: tap -> (L, H), the aux states.
        pre: (L, H) the last state before the final norm, with a sink at position 0.
        post: (L, H) the same behind it.
        norm: (H,) weight of that norm; eps 1e-5.
    """

    ids: Tensor
    mask: Tensor
    states: dict[Tap, Tensor]
    pre: Tensor
    post: Tensor
    norm: Tensor

    @property
    def aux(self) -> Tensor:
        """(L, k*H) the aux states side by side, ascending."""
        return torch.cat(list(self.states.values()), -1)


def native(rng: torch.Generator, length: int = 23, dtype: torch.dtype = torch.float32) -> Native:
    """A random conversation; the loss mask starts after a third, and its last element is a 1."""
    ids = torch.randint(0, VOCAB, (length,), generator=rng)
    mask = torch.zeros(length)
    mask[length // 3 :] = 1
    states = {
        tap: (scale * torch.randn(length, HIDDEN, generator=rng)).to(dtype)
        for tap, scale in zip(TAPS, SCALES, strict=True)
    }
    pre = 40 * torch.randn(length, HIDDEN, generator=rng) * (0.5 + torch.rand(length, 1, generator=rng))
    pre[0] *= 20
    norm = 1 + 0.3 * torch.rand(HIDDEN, generator=rng)
    post = pre * torch.rsqrt(pre.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
    return Native(ids, mask, states, pre.to(dtype), post.to(dtype), norm)


def _torch_save(path: Path, data: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, path)
    return path


def speculators_legacy(folder: Path, n: Native, i: int = 0) -> Path:
    """`data_i.pt`; the list's last element is the verifier's last state (c80a242a^ train/data.py)."""
    states = [*n.states.values(), n.pre]
    return _torch_save(
        folder / f"data_{i}.pt", {"input_ids": n.ids, "loss_mask": n.mask.long(), "hidden_states": states}
    )


def _stack(path: Path, n: Native, states: list[Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"hidden_states": torch.stack(states, 1).contiguous(), "token_ids": n.ids}, path)
    return path


def speculators(folder: Path, n: Native, i: int = 0) -> Path:
    """`hs_i.safetensors`, the last slot pre-norm; its mask is in the arrow dataset (train/data.py)."""
    return _stack(folder / f"hs_{i}.safetensors", n, [*n.states.values(), n.pre])


def speculators_without_last(folder: Path, n: Native, i: int = 0) -> Path:
    """The same, made with --no-include-last-layer; also what vLLM's connector writes for three ids."""
    return _stack(folder / f"hs_{i}.safetensors", n, list(n.states.values()))


def workbook(folder: Path, n: Native, i: int = 0) -> Path:
    """Our own layout."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"c_{i}.safetensors"
    save_capture(path, token_ids=n.ids, loss_mask=n.mask, states=n.states, final=n.pre, final_kind="pre_norm")
    return path


def _specforge(n: Native) -> dict:
    return {
        "input_ids": n.ids,
        "loss_mask": n.mask.long(),
        "hidden_state": n.post[None],
        "aux_hidden_state": n.aux[None],
    }


def specforge(folder: Path, n: Native, i: int = 0) -> Path:
    """`rows_a-b/data_i.ckpt`, 2000 rows a folder; last state post-norm (scripts/prepare_hidden_states.py)."""
    start = i // 2000 * 2000
    return _torch_save(folder / f"rows_{start}-{start + 2000}" / f"data_{i}.ckpt", _specforge(n))


def specforge_gz(folder: Path, n: Native, i: int = 0) -> Path:
    """The same with --compress: gzip around torch.save."""
    path = specforge(folder, n, i)
    packed = path.with_name(f"{path.name}.gz")
    with gzip.open(packed, "wb", compresslevel=6) as f:
        f.write(path.read_bytes())
    path.unlink()
    return packed


def modelopt_hf_old(folder: Path, n: Native, i: int = 0) -> Path:
    """`<conversation_id>.pt`, no loss mask, last state post-norm (compute_hidden_states_hf.py @634054)."""
    name = f"conversation-{i:04}"
    data = {"input_ids": n.ids, "hidden_states": n.post, "aux_hidden_states": n.aux, "conversation_id": name}
    return _torch_save(folder / f"{name}.pt", data)


def modelopt_hf(folder: Path, n: Native, i: int = 0) -> Path:
    """The newer dump: with a loss mask (compute_hidden_states_hf.py @a8c67e)."""
    name = f"conversation-{i:04}"
    data = {
        "input_ids": n.ids,
        "hidden_states": n.post,
        "aux_hidden_states": n.aux,
        "loss_mask": n.mask.long(),
        "conversation_id": name,
    }
    return _torch_save(folder / f"{name}.pt", data)


def modelopt_vllm(folder: Path, n: Native, i: int = 0) -> Path:
    """The vLLM dump: the same keys, last state pre-norm (compute_hidden_states_vllm.py @a8c67e)."""
    path = modelopt_hf(folder, n, i)
    return _torch_save(path, torch.load(path, weights_only=True) | {"hidden_states": n.pre})


def angelslim(folder: Path, n: Native, i: int = 0) -> Path:
    """`rank_r/rows_a-b/data_i.ckpt`, batch axes everywhere (tools/generate_hidden_for_draft_model.py)."""
    start = i // 5000 * 5000
    data = {
        "input_ids": n.ids[None],
        "loss_mask": n.mask.long()[None],
        "hidden_states": n.aux[None],
        "target_hiddens": n.post[None],
    }
    return _torch_save(folder / "rank_0" / f"rows_{start}-{start + 5000}" / f"data_{i}.ckpt", data)


def baldeagle(folder: Path, n: Native, i: int = 0) -> Path:
    """`rows_a-b/data_i.ckpt`; hidden_state is the aux one here (generate_data.py; BaldEagle#18)."""
    start = i // 5000 * 5000
    data = {
        "input_ids": n.ids,
        "loss_mask": n.mask.long(),
        "hidden_state": n.aux[None],
        "target_hidden_states": n.post[None],
    }
    return _torch_save(folder / f"rows_{start}-{start + 5000}" / f"data_{i}.ckpt", data)


@dataclass(frozen=True)
class Writer:
    """A way to write a capture, and what is true of its files.

    Attributes:
        layout: what `recognise` calls them.
        write: (folder, native, index) -> file.
        last: "stored" (last slot), "final" (a state of its own) or None.
        kind: of the last state in the file.
        says_kind: whether the format fixes it.
        has_mask: whether the loss mask is in the file.
    """

    layout: str
    write: Callable[..., Path]
    last: str | None
    kind: str | None
    says_kind: bool = False
    has_mask: bool = True


WRITERS: dict[str, Writer] = {
    "speculators-legacy": Writer("speculators-legacy", speculators_legacy, "stored", "pre_norm"),
    "speculators": Writer("speculators", speculators, "stored", "pre_norm", has_mask=False),
    "speculators-without-last": Writer("speculators", speculators_without_last, None, None, has_mask=False),
    "workbook": Writer("workbook", workbook, "final", "pre_norm", says_kind=True),
    "specforge": Writer("specforge", specforge, "final", "post_norm", says_kind=True),
    "specforge-gz": Writer("specforge", specforge_gz, "final", "post_norm", says_kind=True),
    "modelopt-hf-old": Writer("modelopt", modelopt_hf_old, "final", "post_norm", has_mask=False),
    "modelopt-hf": Writer("modelopt", modelopt_hf, "final", "post_norm"),
    "modelopt-vllm": Writer("modelopt", modelopt_vllm, "final", "pre_norm"),
    "angelslim": Writer("angelslim", angelslim, "final", "post_norm"),
    "baldeagle": Writer("baldeagle", baldeagle, "final", "post_norm", says_kind=True),
}
