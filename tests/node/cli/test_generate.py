"""`generate`: what ends it badly, and with which status."""

from __future__ import annotations

import pytest

from kvasir_node.cli.generate import failure_of
from kvasir_proto.messages.local import GenerateEnd


@pytest.mark.parametrize(
    "code, status, said",
    [
        ("usage_error", 2, "the prompt has 9 tokens, the context 8"),
        ("no_holder_left", 1, "no_holder_left: the prompt has 9 tokens, the context 8"),
    ],
)
def test_an_impossible_prompt_was_called_wrongly(code: str, status: int, said: str) -> None:
    error = failure_of(GenerateEnd("failed", code, "the prompt has 9 tokens, the context 8", "{}"))
    assert (error.exit_code, str(error)) == (status, said)
