"""The form of notebook 07: a report asked for with widgets, in place of parameters.

Every path has a text field, which also takes a hub id, and a file chooser that fills it. The button hands
a `report.Request` to a function; what that function prints or displays appears below. An input that is
refused shows its error there, and the form stays as it was filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import torch
from ipyfilechooser import FileChooser

from lib.errors import WorkbookError
from lib.request import Request
from lib.taps import CONVENTIONS

# Field of the request -> what the form asks, and whether only folders make sense.
PATHS = {
    "draft": ("Draft: its folder, or a hub id", True),
    "captures": ("Captures: their folder, or a hub id", True),
    "target": ("Target, optional: its folder, a .gguf file, or a hub id", False),
    "finals": ("Final states of the same texts, optional: their folder", True),
}
LABEL = {"description_width": "9em"}
WIDE = widgets.Layout(width="44em")


def request_of(values: Mapping[str, Any], defaults: Request | None = None) -> Request:
    """A request from the form's values; texts lose the blanks around them.

    What has no control (dtype, loss_masks, layout) stays as in `defaults`.
    """
    known = {f.name for f in fields(Request)}
    filled = {k: v.strip() if isinstance(v, str) else v for k, v in values.items() if k in known}
    return Request(**((asdict(defaults) if defaults else {}) | filled))


def path_field(
    name: str, question: str, folders_only: bool, start: Path
) -> tuple[widgets.Text, widgets.VBox]:
    """A text field and, below it, the chooser that fills it."""
    text = widgets.Text(description=name, placeholder=question, style=LABEL, layout=WIDE)
    chooser = FileChooser(
        str(start), show_only_dirs=folders_only, title=question, select_desc="Choose",
        change_desc="Choose again", layout=WIDE,
    )  # fmt: skip

    def chosen(widget: FileChooser) -> None:
        # A folder's path ends with a separator; a target may be named by one of its files.
        path = Path(widget.selected)
        text.value = str(path.parent if path.name == "config.json" else path)

    chooser.register_callback(chosen)
    return text, widgets.VBox([chooser, text])


def controls(defaults: Request, start: Path) -> tuple[dict[str, widgets.Widget], list[widgets.Widget]]:
    """Controls by field of the request, and the same as rows to show."""
    found: dict[str, widgets.Widget] = {}
    rows: list[widgets.Widget] = []
    for name, (question, folders_only) in PATHS.items():
        found[name], row = path_field(name, question, folders_only, start)
        found[name].value = getattr(defaults, name)
        rows.append(row)
    target_pass, drafting = defaults.verify_cost, defaults.draft_cost
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices += [defaults.device] if defaults.device not in devices else []  # checked by the request
    others: dict[str, widgets.Widget] = {
        "taps": widgets.Text(
            value=defaults.taps, description="stored taps", layout=WIDE,
            placeholder="embed,layer3,layer31,layer59, where the files do not say",
        ),
        "convention": widgets.Dropdown(
            options=sorted(CONVENTIONS), value=defaults.convention, description="ids read as"
        ),
        "device": widgets.Dropdown(options=devices, value=defaults.device, description="device"),
        "limit": widgets.BoundedIntText(
            value=defaults.limit, min=0, max=max(10**9, defaults.limit), description="files (0: all)"
        ),
        "depth": widgets.IntSlider(
            value=defaults.depth, min=1, max=max(32, defaults.depth), description="draft tokens",
            continuous_update=False,
        ),
        "verify_cost": widgets.BoundedFloatText(
            value=target_pass, min=min(0.01, target_pass), max=max(1000, target_pass), step=0.1,
            description="target pass",
        ),
        "draft_cost": widgets.BoundedFloatText(
            value=drafting, min=0.0, max=max(1000, drafting), step=0.01, description="a draft token"
        ),
        "out": widgets.Text(
            value=defaults.out, description="report goes to", layout=WIDE,
            placeholder="a folder; reports/<draft>-<captures> if empty",
        ),
    }  # fmt: skip
    for control in others.values():
        control.style = LABEL
    rows += others.values()
    costs = "Costs are in plain decoding steps: a target pass over a round, and one draft token."
    rows.append(widgets.HTML(costs))
    return found | others, rows


def request_form(make: Callable[[Request], None], defaults: Request, start: Path) -> widgets.VBox:
    """The form; its button calls `make(request)` and shows what that displays.

    Args:
        make: builds and shows a report.
        defaults: what the form stands at.
        start: folder that the choosers open first.
    """
    found, rows = controls(defaults, start)
    button = widgets.Button(description="Make the report", button_style="primary")
    output = widgets.Output()

    def pressed(_button: widgets.Button) -> None:
        output.clear_output()
        button.disabled = True
        with output:
            try:
                make(request_of({name: control.value for name, control in found.items()}, defaults))
            except WorkbookError as err:
                print(err)
            finally:
                button.disabled = False

    button.on_click(pressed)
    box = widgets.VBox([*rows, button, output])
    box.add_class("request-form")
    return box
