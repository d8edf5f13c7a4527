"""What a file could be, and why: every format's recogniser answers with matches, never with a guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.errors import WorkbookError

# Tensors read of a target, by part (here because lib.hub asks for them without loading torch). Anchored:
# layers (DeepSeek's MTP) and talkers have tensors of the same last name.
PREFIX = r"((language_)?model\.)*"
PARTS = {
    "embed": rf"{PREFIX}embed_tokens\.weight",
    "norm": rf"{PREFIX}norm\.weight",
    "lm_head": rf"{PREFIX}lm_head\.weight",
}
BIAS = rf"{PREFIX}(norm|lm_head)\.bias"
HEAD = "|".join((*PARTS.values(), BIAS))


@dataclass(frozen=True)
class Match:
    """One format that a file or folder could be.

    Attributes:
        format: its name, as readers and reports use it ("specforge", "speculators-legacy", ...).
        evidence: what in the file says so, one short sentence each.
    """

    format: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        """`specforge: keys hidden_state, aux_hidden_state; aux is 3 times as wide`."""
        return f"{self.format}: {'; '.join(self.evidence)}"


def only(
    path: str | Path, matches: Sequence[Match], error: type[WorkbookError], *, wanted: str | None = None,
    known: Sequence[str] = (), seen: str = "",
) -> Match:  # fmt: skip
    """The one match; `error` when there is none, or several and nobody chose.

    Args:
        path: the file, for the message.
        matches: what the recognisers answered.
        error: the error's class.
        wanted: a format the caller insists on.
        known: formats that were tried, for the message.
        seen: what the file holds, for the message when nothing matches.
    """
    fitting = [m for m in matches if wanted is None or m.format == wanted]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise error(
            path, "format", expected=f"{wanted or 'one of ' + str(sorted(known))}",
            found=" or ".join(map(str, matches)) or seen or "nothing that is known",
            remedy="name the format only if you know its writer; otherwise convert the file",
        )  # fmt: skip
    raise error(
        path, "format", expected="a file of one format", found=" or ".join(map(str, fitting)),
        remedy=f"the content alone cannot decide: name one of {[m.format for m in fitting]}",
    )  # fmt: skip
