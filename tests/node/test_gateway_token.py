"""Which file may hold the gateway's token."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.gateway_token import load_gateway_token
from kvasir_proto.errors import ConfigurationInvalid

TOKEN = "0123456789abcdef"


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_no_file_is_no_token(tmp_path: Path) -> None:
    assert load_gateway_token(tmp_path / "gateway-token") is None


@pytest.mark.parametrize("end", ["", "\n"])
def test_one_line(tmp_path: Path, end: str) -> None:
    assert load_gateway_token(write(tmp_path / "gateway-token", (TOKEN + end).encode())) == TOKEN


@pytest.mark.parametrize("data", [b"", b"\n", b"\xc3\xa9" * 20, b"one\ntwo\n", b"x" * 5000])
def test_what_is_no_token(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigurationInvalid, match="holds no token"):
        load_gateway_token(write(tmp_path / "gateway-token", data))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigurationInvalid, match="chmod 600") as refused:
        load_gateway_token(write(tmp_path / "gateway-token", TOKEN.encode(), mode))
    assert TOKEN not in str(refused.value)


def test_a_directory_in_its_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match="cannot be read"):
        load_gateway_token(tmp_path)
