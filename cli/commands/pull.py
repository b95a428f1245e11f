"""`tandem pull`: downloads a model of the catalogue into the cache, with a progress bar."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from model_files import catalogue


def pull(name: str, console: Console) -> Path:
    """Download the model unless it is cached. Returns the path of its file. Raises `TandemError`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console)
    bar = progress.add_task(f"fetching {name}", total=None)
    with ExitStack() as shown:

        def on_progress(so_far: int, in_all: int) -> None:
            if not progress.live.is_started:  # an unused bar would leave an empty line
                shown.enter_context(progress)
            progress.update(bar, completed=so_far, total=in_all)

        return catalogue.fetch(name, on_progress)


def pull_if_listed(model: str, console: Console) -> None:
    """Download `model` if the catalogue lists it; any other model must be on this machine."""
    if model in catalogue.CATALOGUE:
        pull(model, console)
