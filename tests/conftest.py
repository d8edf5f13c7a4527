"""Shared fixtures: tiny random models of the real classes, and the shipped samples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def rng() -> torch.Generator:
    """A seeded generator; tests never use the global one."""
    return torch.Generator().manual_seed(2025)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """IPython as a notebook has it, so that what a callback displays can be read."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    yield InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    InteractiveShell.clear_instance()
