"""What every test shares: Hypothesis draws the same examples on every machine and run, and never times them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tandem", derandomize=True, database=None, deadline=None)
settings.load_profile("tandem")
