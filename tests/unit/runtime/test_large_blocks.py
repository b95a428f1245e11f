"""A block that is larger than others before it is still mapped by itself, so it is unmapped when it is freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from runtime.large_blocks import LARGE_BYTES, give_large_blocks_back

class Info(ctypes.Structure):  # mallinfo2; hblks: the number of blocks that are mapped by themselves
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if sys.argv[1] == "given back":
    give_large_blocks_back()
largest = bytearray(16 * LARGE_BYTES)
del largest
before = libc.mallinfo2().hblks
kept = [bytearray(2 * LARGE_BYTES) for _ in range(8)]
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
@pytest.mark.parametrize(("how", "num_mapped"), [("given back", 8), ("as glibc does", 0)])
def test_a_large_block_is_mapped_by_itself(how: str, num_mapped: int) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    assert int(ran.stdout) == num_mapped
