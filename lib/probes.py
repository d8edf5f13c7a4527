"""All probes, in the order in which they run: captures, weights and maps, last states and text, config.

To add one, write a function under `@probe(name, *needs)` in the module of its part (`lib.probing` says how).
"""

from __future__ import annotations

# isort: off
from lib import probes_captures, probes_weights, probes_text, probes_config  # noqa: F401 (they run in this order)

# isort: on
from lib.probing import NEEDS, PROBES, Probe, Seen, View, probe, run_probes

__all__ = ["NEEDS", "PROBES", "Probe", "Seen", "View", "probe", "run_probes"]
