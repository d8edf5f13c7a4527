"""Tables of the blind record: shares, misses, confusion."""

from __future__ import annotations

import json

from lib.blind_view import ROWS, confusion, misses, record, shares, summary_table
from lib.faults import FAULTS

TOLD = {
    "summary": {
        "full": {"clear": "9/10", "subtle": "0/0", "controls accused": "1/4"},
        "no head": {"clear": "3/4"},
        "misses": {"slot_order (seed 1) on a": {"class": "clear", "slot_order": "called healthy"}},
        "confusion": {"slot_order": {"slot_order": 2, "healthy": 1}, "feedback": {"feedback": 3}},
    }
}


def test_shares_leave_out_what_was_not_tried():
    """Nothing of nothing is no share; a part that is missing is none either."""
    assert shares(TOLD) == {"clear": (9, 10), "accused": (1, 4), "headless.clear": (3, 4)}
    table = summary_table(TOLD)
    assert table["%"].tolist() == [90.0, 25.0, 75.0] and table.of.tolist() == [10, 4, 4]


def test_misses_and_confusion_name_planted_and_said():
    """One row per miss with its reason; right names are no confusion."""
    row = misses(TOLD).loc["slot_order (seed 1) on a"]
    assert (row["class"], row.planted, row["why it was missed"]) == ("clear", "slot_order", "called healthy")
    assert confusion(TOLD).values.tolist() == [["slot_order", "healthy", 1]]


def test_the_committed_record_can_be_told(tmp_path):
    """Every share has its row; what is planted is in the zoo; the default path is the committed file."""
    told = record()
    path = tmp_path / "blind.json"
    path.write_text(json.dumps(told))
    assert record(path) == told and shares(told).keys() <= ROWS.keys() and "clear" in shares(told)
    assert set(misses(told).planted) <= set(FAULTS) and set(confusion(told).planted) <= set(FAULTS)
