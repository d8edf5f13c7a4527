"""`make diagnose`: the case that files on a disk make, and the verdict as text and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lib.captures import FINAL
from lib.case import Case
from lib.diagnose import as_json, main, open_case, told
from lib.diagnosis import diagnose
from lib.errors import CaptureError
from lib.notebook import ROOT
from lib.request import SAMPLE, Request
from lib.samples import SAMPLES
from tests.support import self_written
from tests.test_diagnosis import TAPS, TRUE

DRAFT, CAPTURES = SAMPLES / "drafts" / "a_incident", SAMPLES / "captures" / "incident"
FINALS = SAMPLES / "captures" / "final"


def test_a_case_of_the_sample_files():
    """Draft, head, captures and final states of the samples; what is told is the files' own."""
    request = Request(str(DRAFT), str(CAPTURES), SAMPLE, finals=str(FINALS), convention="sglang", limit=3)
    case, warnings = open_case(request)
    assert len(case.captures) == 3 and not case.unread and case.live is None
    assert case.head.n_layers == 30 and all(FINAL in c.readers for c in case.captures)
    assert [str(t) for t in case.draft.contract.taps] == ["layer3", "layer16", "layer28"] and not warnings


def test_a_file_that_cannot_be_read_is_kept_as_its_error(tmp_path):
    """One broken file among good ones is told; none but broken ones is an error."""
    folder = tmp_path / "captures"
    folder.mkdir()
    good = sorted(CAPTURES.iterdir())[:2]
    for path in good:
        (folder / path.name).write_bytes(path.read_bytes())
    broken = folder / f"data_99{good[0].suffix}"
    broken.write_bytes(b"no capture")
    case, _ = open_case(Request(str(DRAFT), str(folder), SAMPLE))
    assert len(case.captures) == 2 and [broken.name in str(e) for e in case.unread] == [True]
    for path in good:
        (folder / path.name).unlink()
    with pytest.raises(CaptureError, match="1 refused"):
        open_case(Request(str(DRAFT), str(folder), SAMPLE))


def test_the_verdict_as_text_and_as_json(tmp_path):
    """Every finding with its evidence; nothing in JSON that it cannot hold."""
    draft, captures = self_written(tmp_path, TAPS, TRUE, length=40, texts=12)
    wrong = replace(draft, contract=draft.contract.change(token_shift=0))
    found = diagnose(Case(wrong, tuple(captures)))
    text, record = told(found), json.loads(json.dumps(as_json(found)))
    assert text.startswith("verdict: fault") and "token_shift" in text and "not run: " in text
    assert record["findings"][0]["kind"] == "token_shift_0" and "fix" not in record["findings"][0]
    assert record["numbers"]["after"]["accuracy"] == 1 and record["because"] == found.because


def test_an_error_is_one_line(capsys, tmp_path):
    """A path that is none: exit status 2, one line that names it."""
    with pytest.raises(SystemExit) as left:
        main(["--draft", str(tmp_path / "nowhere"), "--captures", str(CAPTURES)])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1 and "nowhere" in error


@pytest.mark.slow
def test_the_incident_by_the_command_line(tmp_path):
    """From the files alone, in a process of its own: the slice, first."""
    out = tmp_path / "verdict.json"
    command = [sys.executable, "-m", "lib.diagnose", "--draft", str(DRAFT), "--captures", str(CAPTURES)]
    command += ["--target", SAMPLE, "--convention", "sglang", "--limit", "8", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["verdict"] == "fault" and record["findings"][0]["kind"] == "incident_slice"
    assert "trained on (embed, layer3, layer16)" in done.stdout
    assert torch.tensor(record["findings"][0]["accuracy"]).diff() > 0.3
