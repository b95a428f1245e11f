"""`tandem pull`: fetch a model of the catalogue into the cache, with a progress bar."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from model_files import catalogue


def pull(name: str, console: Console) -> Path:
    """The model file, downloaded only where it is not cached. Raises `TandemError`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console)
    bar = progress.add_task(f"fetching {name}", total=None)
    with ExitStack() as shown:

        def on_progress(so_far: int, in_all: int) -> None:
            if not progress.live.is_started:  # a bar with nothing to show would leave an empty line behind
                shown.enter_context(progress)
            progress.update(bar, completed=so_far, total=in_all)

        return catalogue.fetch(name, on_progress)


def pull_if_named(model: str, console: Console) -> None:
    """Fetch `model` where it is a name of the catalogue; everything else is on this machine or nowhere."""
    if model in catalogue.CATALOGUE:
        pull(model, console)
