"""The native library once more, with sanitizers for addresses and for undefined behaviour.

Decides how it is built and with what environment a process can load it. The compiler is the one that set-up
needs anyway; where it has no sanitizers, that is said and nothing else. GCC's run-time library takes the
place of libFuzzer's for coverage, so a sanitised run is blind: it changes inputs that a guided one has found.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_FLAGS: Final = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
_RUNTIMES: Final = ("libasan.so", "libubsan.so")


def build_sanitised(destination: Path) -> str:
    """Build the library at `destination`; empty when it is there, otherwise why it could not be built."""
    sources = sorted(str(each) for each in (ROOT / "native/src").glob("*.cpp"))
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, *_FLAGS, f"-I{ROOT / 'native/include'}", *sources, "-o", str(destination)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} builds no library with sanitizers ({type(error).__name__})"
    missing = [each for each in _RUNTIMES if not Path(_runtime(compiler, each)).is_absolute()]
    return f"{compiler} does not have {missing[0]}" if missing else ""


def sanitised_environment() -> dict[str, str]:
    """The environment of a process that loads the library: the sanitizers have to be there first."""
    compiler = os.environ.get("CXX", "c++")
    return os.environ | {
        "LD_PRELOAD": " ".join(_runtime(compiler, each) for each in _RUNTIMES),
        # Python leaves a lot to the end of the process; what was freed need not be kept for long.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _runtime(compiler: str, name: str) -> str:
    """Where the compiler keeps a run-time library; its bare name when it has none."""
    asked = subprocess.run(
        [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True, timeout=60
    )
    return asked.stdout.strip()
