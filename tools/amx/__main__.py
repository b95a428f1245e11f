"""Run a command as on a Xeon with AMX, on a CPU with AVX-512 BF16 but without AMX:

    python -m tools.amx pytest -q -n 2 tests/unit/engine/cpu

/proc/cpuinfo names AMX there, so the kernels for tiles are compiled and chosen, and `tile_traps.c` runs each of their
tile instructions. It is slow, about 2 us an instruction: the default model decodes a token in two seconds. It needs the
right to mount.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.cpu.build import AMX, find_compiler
from engine.cpu.features import CPUINFO, cpu_flags

_SOURCE = Path(__file__).with_name("tile_traps.c")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_IN_THE_PLACE_OF_CPUINFO = f'mount --bind "$0" {CPUINFO} && exec "$@"'


def main(command: list[str]) -> int:
    """The exit status of `command`."""
    if not command:
        print("usage: python -m tools.amx COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    if "avx512_bf16" not in cpu_flags():
        print("error: this CPU lacks avx512_bf16, which every CPU with AMX has", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        traps, cpuinfo = Path(scratch) / "tile_traps.so", Path(scratch) / "cpuinfo"
        build: list[str | Path] = [find_compiler(), *_FLAGS, _SOURCE, "-o", traps, "-ldl", "-lm"]
        subprocess.run(build, check=True)
        cpuinfo.write_text(_as_a_xeon(CPUINFO.read_text()))
        preloaded = {"LD_PRELOAD": " ".join(filter(None, (str(traps), os.environ.get("LD_PRELOAD"))))}
        shell = ["unshare", "--mount", "sh", "-c", _IN_THE_PLACE_OF_CPUINFO, str(cpuinfo)]
        return subprocess.run([*shell, *command], env=os.environ | preloaded, check=False).returncode


def _as_a_xeon(cpuinfo: str) -> str:
    lines = cpuinfo.replace("AuthenticAMD", "GenuineIntel").splitlines()
    return "".join(f"{line} {' '.join(sorted(AMX))}\n" if line.startswith("flags") else f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
