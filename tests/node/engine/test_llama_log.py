"""What llama.cpp says becomes events of ours, and what we made it say is no warning."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kvasir_node.engine.llama_log import _LineAssembler, expect_errors, forget_errors, why_it_failed

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
