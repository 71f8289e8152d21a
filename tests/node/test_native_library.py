"""The native library refuses any ggml but the one it was made for, and any second one beside it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvasir_node import native_library
from kvasir_proto.errors import IncompatibleVersion

PREAMBLE = """
import ctypes, sys
from pathlib import Path
from kvasir_node import native_library
from kvasir_proto.errors import IncompatibleVersion
def expect(text):
    try:
        native_library.self_check()
    except IncompatibleVersion as error:
        print(error)
        sys.exit(error.exit_code if text in str(error) else 1)
"""


def in_a_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_installed_library_fits() -> None:
    native_library.self_check()
    native = native_library.load()
    assert native is native_library.load()
    assert (native.abi, native.ggml_version) == (native_library.NATIVE_ABI, "0.25.3")


@pytest.mark.slow
def test_a_second_ggml_is_noticed() -> None:
    result = in_a_fresh_process(
        "import llama_cpp\n"
        "lib = Path(llama_cpp.__file__).parent / 'lib'\n"
        "ctypes.CDLL(str(lib / 'libggml-base.so'))\n"
        "expect('2 copies of ggml')"
    )
    assert result.returncode == IncompatibleVersion.exit_code, result.stdout + result.stderr


@pytest.mark.slow
def test_a_second_ggml_that_comes_later_is_noticed() -> None:
    result = in_a_fresh_process(
        "native_library.self_check()\n"
        "import llama_cpp\n"
        "ctypes.CDLL(str(Path(llama_cpp.__file__).parent / 'lib' / 'libggml-base.so'))\n"
        "expect('2 copies of ggml')"
    )
    assert result.returncode == IncompatibleVersion.exit_code, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, text",
    [
        ("native_library.NATIVE_ABI = 99", "has ABI 3, this version of Kvasir needs 99"),
        ("native_library._LIBRARY_NAMES['linux'] = (b'libm.so.6',) * 3", "it has no function ggml_version"),
        ("native_library._LIBRARY_NAMES['linux'] = (b'libggml-base.so.9',) * 3", "so.9 is not loaded"),
        ("sys.platform = 'plan9'", "not made for plan9"),
    ],
)
def test_what_does_not_fit_is_named(change: str, text: str) -> None:
    result = in_a_fresh_process(f"{change}\nexpect({text!r})")
    assert result.returncode == IncompatibleVersion.exit_code, result.stdout + result.stderr


def test_nothing_is_created_before_the_library_is_bound() -> None:
    result = in_a_fresh_process(
        "library = ctypes.CDLL(native_library._library_path())\n"
        "library.kvasir_hook_create.restype = library.kvasir_kernel_create.restype = ctypes.c_void_p\n"
        "assert library.kvasir_hook_create(None) is None\n"
        "assert library.kvasir_kernel_create(1, 1) is None\n"
    )
    assert result.returncode == 0, result.stderr
