"""Which code a node's experts are computed with, in one word: another build is measured anew.

Covers everything on this machine that a kernel's arithmetic can depend on and that can change under a node:
our kernels and what measures them, the native library, ggml's, numpy, the instructions that the processor
has, and the driver of a device. It reads files and loads none of them, so that a control process can ask. It
refuses to know models.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvasir_node import __version__

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_SOURCES: Final = ("kernels/*.py", "certification/*.py", "data/opencl/*.cl", "_native*")
_PROCESSOR_FILE: Final = Path("/proc/cpuinfo")
_PROCESSOR_LINES: Final = ("flags", "Features", "model name", "CPU part")
_ALWAYS: Final = ("libggml-base", "libggml-cpu")
_DIGITS: Final = 24


def kernel_build(driver: str = "", programs: Sequence[str] = ()) -> str:
    """The version of this program and a digest. `driver` is that of the device that computes, if any, and
    `programs` are paths of what is started to compute, its emulator too. Raises `OSError` without them.
    """
    found = hashlib.sha256()
    texts = (driver, importlib.metadata.version("numpy"), *_processor())
    for data in (
        *(each.encode() for each in texts),
        *_contents(),
        *(Path(each).read_bytes() for each in programs),
    ):
        found.update(len(data).to_bytes(8, "big") + data)
    return f"{__version__}+{found.hexdigest()[:_DIGITS]}"


def backend_libraries() -> list[str]:
    """Paths of all of llama.cpp's backends, for a kernel that computes by one of them."""
    return [str(path) for name, path in _libraries().items() if name not in _ALWAYS]


def _libraries() -> dict[str, Path]:
    """ggml's libraries by name; each lies there under three."""
    found = importlib.util.find_spec("llama_cpp")
    directories = (found.submodule_search_locations or ()) if found is not None else ()
    return {
        path.name.split(".")[0]: path
        for directory in directories
        for path in sorted(Path(directory, "lib").glob("libggml*"))
    }


def _processor() -> Iterator[str]:
    """What is told of the first processor, and of its instructions."""
    yield platform.machine()
    try:
        lines = _PROCESSOR_FILE.read_text(errors="replace").splitlines()
    except OSError:
        yield platform.processor()
        return
    for name in _PROCESSOR_LINES:
        yield next((line for line in lines if line.startswith(name)), "")


def _contents() -> Iterator[bytes]:
    """Of each file that computes its name and its bytes, in order."""
    paths = [path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)]
    paths += [path for name, path in _libraries().items() if name in _ALWAYS]
    for path in sorted(paths, key=lambda each: each.name):
        yield path.name.split(".")[0].encode()
        yield path.read_bytes()
