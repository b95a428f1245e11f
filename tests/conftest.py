"""What every test shares: Hypothesis draws the same examples on every machine, and never times them.

Some of them are constants of the modules that are loaded, so a test that runs alone may see others than in a full run.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tandem", derandomize=True, database=None, deadline=None)
settings.load_profile("tandem")
