"""What llama.cpp and ggml say, as events of ours instead of lines on standard error.

llama.cpp prints some hundreds of lines for each model. Its errors become warnings, because whatever failed is
reported by us as well; all the rest is for somebody who looks for a bug. The first error of a call is kept,
because llama.cpp returns nothing but a null pointer. The file it opened is ours, and the user never named it:
its path becomes "the model". What ggml says before it ends the process can be told to somebody. The module
decides nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import llama_cpp

from kvasir_node.native_library import AbortCallback, load_ggml
from kvasir_node.telemetry import get_logger
from kvasir_proto.limits import as_sentence

log = get_logger()

_ERROR: Final = 4  # as ggml.h counts; the table in llama_cpp._logger is an older one
_CONTINUED: Final = 5

_WHERE: Final = re.compile(r"(?:(?:[A-Za-z_]\w*|error loading model): )+", re.ASCII)
"""What llama.cpp puts before the reason: in which function of its own, doing what."""

_SOURCE_LINE: Final = re.compile(r"[^\n]{0,4096}?:[0-9]{1,9}: ", re.ASCII)
"""What ggml puts before the reason for an abort: a file on the machine that compiled it."""


class _LineAssembler:
    """Puts together the pieces of a line that llama.cpp logs one by one."""

    def __init__(self) -> None:
        self._level = 0
        self._text = ""
        self.first_error = ""
        self.is_expected = False
        self.model_path = ""

    def take(self, level: int, piece: bytes) -> None:
        if level != _CONTINUED:
            self._level = level
        self._text += piece.decode(errors="replace")
        if not self._text.endswith("\n"):
            return
        text, self._text = self._text.strip(), ""
        if self.model_path:
            text = text.replace(self.model_path, "the model")
        if self._level == _ERROR:
            (log.debug if self.is_expected else log.warning)("llama_cpp_error", text=text)
            self.first_error = self.first_error or text
        elif text:
            log.debug("llama_cpp_said", text=text)


_assembler = _LineAssembler()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _callback(level: int, piece: bytes, _: ctypes.c_void_p) -> None:
    _assembler.take(level, piece)


def forget_errors() -> None:
    """Say that a call begins whose failure is to be explained."""
    _assembler.first_error = ""
    _assembler.is_expected = False


def name_model(path: str) -> None:
    """Say which file llama.cpp is about to open: it is called "the model" from now on."""
    _assembler.model_path = path


def expect_errors() -> None:
    """Say that we made the call under way fail: what is said of it until `forget_errors` is no news."""
    _assembler.is_expected = True


def why_it_failed() -> str:
    """ ": " and the first error since `forget_errors`, in llama.cpp's words; empty when it gave none."""
    where = _WHERE.match(_assembler.first_error)
    reason = _assembler.first_error[where.end() if where else 0 :]
    return f": {reason}" if reason else ""


def capture_llama_log() -> None:
    """From now on this process logs what llama.cpp says as `llama_cpp_error` and `llama_cpp_said`."""
    llama_cpp.llama_log_set(_callback, ctypes.c_void_p())


@contextlib.contextmanager
def llama_log_captured() -> Iterator[None]:
    """As `capture_llama_log`, while inside; what llama.cpp says then goes where it went before."""
    callback, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    capture_llama_log()
    try:
        yield
    finally:
        llama_cpp.llama_log_set(callback, data)


_abort_callbacks: list[Any] = []  # ggml keeps their addresses as long as the process lives


def tell_abort(tell: Callable[[str], None]) -> None:
    """Have ``tell`` called, with one sentence, when ggml is about to end this process; it may end it itself.

    It is called in the thread that ggml computes in, at times in several at once.
    """

    def callback(message: bytes) -> None:
        reason = reason_of_abort(message)
        log.error("ggml_aborted", reason=reason)
        tell(f"llama.cpp gave up on the model: {reason}")

    kept = AbortCallback(callback)
    _abort_callbacks.append(kept)
    load_ggml().set_abort_callback(kept)


def reason_of_abort(message: bytes) -> str:
    """ggml's own words, without the place in its source; at most a `Sentence` together with ours."""
    text = message.decode(errors="replace").strip()
    where = _SOURCE_LINE.match(text)
    return as_sentence(text[where.end() if where else 0 :])[:900]
