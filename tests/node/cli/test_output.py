"""What other nodes say cannot steer a terminal, nor break the table that shows it."""

from __future__ import annotations

import pytest

from kvasir_node.cli.output import print_table, printable


def test_what_strangers_say_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ("MEMBER", "REASON"), [("a", "[/x] gone"), ("b", "\x1b[31mred\nforged row"), ("c", "[error]")]
    )
    out = capsys.readouterr().out
    assert "[/x] gone" in out
    assert "[error]" in out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 4


def test_letters_of_all_languages_are_printable() -> None:
    assert printable("Grüße, 世界") == "Grüße, 世界"
    assert printable("\x1b[2J\r\n\x00") == "\ufffd[2J\ufffd\ufffd\ufffd"
