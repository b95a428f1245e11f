"""The Triton kernels under Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest tests/kernels`.

Triton reads the variable when it is imported, so these tests have a process of their own. Others ignore this folder.
An interpreted program takes 30 to 100 ms: a case launches at most 32 programs.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
