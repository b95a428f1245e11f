"""Takes a resource of the operating system away from this process and its children, for a while."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def _limit(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def no_file_larger_than(num_bytes: int) -> contextlib.AbstractContextManager[None]:
    """A write beyond this size ends early, then fails. A full disk ends a write in the same way."""
    return _limit(resource.RLIMIT_FSIZE, num_bytes)


def no_more_descriptors() -> contextlib.AbstractContextManager[None]:
    """Every call that needs a new file descriptor fails with EMFILE."""
    return _limit(resource.RLIMIT_NOFILE, 0)
