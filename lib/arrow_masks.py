"""Loss masks of a preprocessed speculators dataset: row N of its arrow files belongs to `hs_N`."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from lib.errors import CaptureError


def numeric(path: Path) -> tuple[int, str]:
    """Sort key of a file or folder: the last number in its name (-1 if none), then the name."""
    number = re.search(r"(\d+)(?!.*\d)", path.stem)
    return (int(number[1]) if number else -1, path.name)


def arrow_files(folder: Path) -> list[Path]:
    """The data files of a dataset; `datasets` leaves cache-*.arrow of later `map` calls beside them."""
    return [f for f in sorted(folder.glob("*.arrow")) if not f.name.startswith("cache-")]


class ArrowMasks:
    """The `loss_mask` column of a dataset that speculators' data preparation wrote."""

    def __init__(self, folder: Path) -> None:
        """Map the arrow files of `folder`; CaptureError if there are none, or none with masks."""
        import pyarrow as pa

        files = arrow_files(folder)
        if not files:
            raise CaptureError(
                folder, "loss_masks", expected="a dataset folder with *.arrow files", found="none",
                remedy="pass the folder that speculators' data preparation wrote",
            )  # fmt: skip
        tables = []
        for file in files:
            try:
                tables.append(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())
            except (pa.ArrowInvalid, OSError) as err:
                raise CaptureError(
                    file, "arrow stream", expected="an arrow stream as `datasets` writes it",
                    found=str(err), remedy="write the dataset again with save_to_disk",
                ) from err  # fmt: skip
        try:
            self.table, self.folder = pa.concat_tables(tables), folder
        except pa.ArrowInvalid as err:
            raise CaptureError(
                folder, "arrow stream", expected="files with the same columns", found=str(err)[:200],
                remedy="the folder mixes two datasets: write one of them again with save_to_disk",
            ) from err  # fmt: skip
        if "loss_mask" not in self.table.column_names:
            raise CaptureError(
                folder, "loss_mask", expected="a column of that name",
                found=str(self.table.column_names), remedy="preprocess the dataset with a loss mask",
            )  # fmt: skip

    def of(self, file: Path, token_ids: Tensor | None = None) -> Tensor:
        """(L,) the mask of the row whose number the file carries.

        Args:
            file: the capture.
            token_ids: (L,) of the capture; compared with the row's `input_ids` if the dataset has them.

        Raises CaptureError if there is no such row, or it is another text's.
        """
        row = numeric(file)[0]
        if not 0 <= row < len(self.table):
            raise CaptureError(
                file, "row", expected=f"a number below {len(self.table)}, rows of {self.folder}",
                found=str(row), remedy="validation files start at an offset: pass their own dataset",
            )  # fmt: skip
        if token_ids is not None and "input_ids" in self.table.column_names:
            self._check_text(file, row, token_ids)
        return self._list("loss_mask", row, "a list of zeros and ones")

    def _list(self, column: str, row: int, expected: str) -> Tensor:
        """One cell as a tensor; CaptureError if it is no list of numbers."""
        value = self.table.column(column)[row].as_py()
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as err:
            raise CaptureError(
                self.folder, f"{column} row {row}", expected=expected,
                found=type(value).__name__, remedy="preprocess the dataset with a loss mask",
            ) from err  # fmt: skip

    def _check_text(self, file: Path, row: int, token_ids: Tensor) -> None:
        """A row of another text has a mask too, often one of the same length: the tokens tell."""
        ids = self._list("input_ids", row, "a list of token ids").flatten()
        n = min(len(ids), len(token_ids))
        differ = (ids[:n].double() != token_ids[:n].double()).nonzero().flatten()
        if len(differ):
            at = int(differ[0])
            raise CaptureError(
                file, "token ids", expected=f"the tokens of row {row} of {self.folder}, whose mask this is",
                found=f"id {int(token_ids[at])} in place of {ids[at].item()} at position {at}",
                remedy="the dataset was shuffled or filtered after capturing: pass the one captured from",
            )  # fmt: skip
