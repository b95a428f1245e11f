"""The progress bar of `tandem pull`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cli.pull import pull
from model_files import catalogue


@pytest.mark.parametrize("downloads", [False, True])
def test_a_progress_bar_appears_only_for_a_download(downloads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(_: str, on_progress: catalogue.Progress) -> Path:
        if downloads:
            on_progress(5, 10)
            on_progress(10, 10)
        return Path("model.gguf")

    monkeypatch.setattr(catalogue, "fetch", fetch)
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    assert pull("some", console) == Path("model.gguf")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("fetching some" in shown) == bool(shown) == downloads
