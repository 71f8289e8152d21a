"""What llama.cpp says becomes events of ours, and what we made it say is no warning."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import llama_cpp
import pytest
from structlog.testing import capture_logs

from kvasir_node.engine.llama_log import (
    _LineAssembler,
    expect_errors,
    forget_errors,
    llama_log_captured,
    name_model,
    reason_of_abort,
    why_it_failed,
)

ERROR, CONTINUED = 4, 5


@pytest.mark.parametrize("is_expected, level", [(False, "warning"), (True, "debug")])
def test_an_error_that_we_caused_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, is_expected: bool, level: str
) -> None:
    assembler = _LineAssembler()
    monkeypatch.setattr("kvasir_node.engine.llama_log._assembler", assembler)
    if is_expected:
        expect_errors()
    with capture_logs() as events:
        assembler.take(ERROR, b"process_ubatch: failed to compute ")
        assembler.take(CONTINUED, b"graph\n")
    text = "process_ubatch: failed to compute graph"
    assert events == [{"event": "llama_cpp_error", "log_level": level, "text": text}]
    assert why_it_failed() == ": failed to compute graph"
    forget_errors()
    with capture_logs() as events:
        assembler.take(ERROR, b"llama_decode: no memory\n")
    assert [each["log_level"] for each in events] == ["warning"]


def test_a_file_that_the_user_never_named_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assembler = _LineAssembler()
    monkeypatch.setattr("kvasir_node.engine.llama_log._assembler", assembler)
    name_model("/cache/models/abc/reference.gguf")
    with capture_logs() as events:
        assembler.take(ERROR, b"load: failed to load model '/cache/models/abc/reference.gguf'\n")
    assert events[0]["text"] == "load: failed to load model 'the model'"
    assert why_it_failed() == ": failed to load model 'the model'"


@pytest.mark.parametrize(
    "message, reason",
    [
        (b"/build/ggml/src/ops.cpp:3661: GGML_ASSERT(eps >= 0.0f) failed", "GGML_ASSERT(eps >= 0.0f) failed"),
        (b"C:\\build\\ops.cpp:1: fatal error: 2: what", "fatal error: 2: what"),
        (b"x.cpp:1: \xff\x1b[2J\n", "\ufffd\ufffd[2J"),
        (b"no place", "no place"),
        (b"", ""),
    ],
)
def test_what_ggml_says_last_is_told_without_the_place_in_its_source(message: bytes, reason: str) -> None:
    assert reason_of_abort(message) == reason
    assert len(reason_of_abort(message * 2000)) <= 900


def _listener() -> int | None:
    """Where llama.cpp's lines go, as an address."""
    callback, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    return ctypes.cast(callback, ctypes.c_void_p).value


@pytest.fixture
def listens_otherwise() -> Iterator[None]:
    """Somebody hears llama.cpp's lines already, whatever tests before have had captured."""
    callback, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    listener = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(listener, ctypes.c_void_p())
    yield
    llama_cpp.llama_log_set(callback, data)


@pytest.mark.usefixtures("listens_otherwise")
@pytest.mark.parametrize("error", [None, KeyError("what goes wrong inside")])
def test_a_log_captured_for_a_while_goes_where_it_went_before(error: Exception | None) -> None:
    before = _listener()
    with contextlib.suppress(KeyError), llama_log_captured():
        assert _listener() != before
        if error is not None:
            raise error
    assert _listener() == before
