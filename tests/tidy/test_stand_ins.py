"""A stand-in can be imported and can do nothing: above all, it can say of no signature that it is good."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.tidy.repository import ROOT

FOLDER = ROOT / "deploy/stand-ins/fastecdsa"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in's package, imported from the repository whatever is installed."""

    def forget() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] == "fastecdsa"]
        return {name: sys.modules.pop(name) for name in names}

    installed = forget()
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("fastecdsa")
    forget()
    sys.modules.update(installed)


def test_its_version_is_the_one_libp2p_asks_for() -> None:
    text = (FOLDER / "pyproject.toml").read_text()
    assert 'version = "2.3.2+kvasir.standin"' in text
    assert version("fastecdsa").startswith("2.3.2")


@pytest.mark.parametrize(
    "module", ["curve", "keys", "point", "ecdsa", "encoding", "encoding.sec1", "encoding.util"]
)
def test_every_use_raises(stand_in: Any, module: str) -> None:
    taken = getattr(importlib.import_module(f"fastecdsa.{module}"), "verify")  # noqa: B009 - any name will do
    uses = (
        lambda: taken(b"signature", b"message", b"key"),
        lambda: bool(taken),
        lambda: taken == taken,
        lambda: taken != 1,
        lambda: taken.P256,
        lambda: len(taken),
        lambda: list(taken),
        lambda: taken[0],
        lambda: 1 in taken,
        lambda: taken * 2,
        lambda: 2 * taken,
        lambda: int(taken),
        lambda: bytes(taken),
        lambda: taken < 1,
    )
    for use in uses:
        with pytest.raises(stand_in.StandInUsed, match="stand-in"):
            use()


def test_looking_for_an_interface_finds_none_rather_than_a_trap(stand_in: Any) -> None:
    taken = stand_in.keys.sign
    assert not hasattr(taken, "__await__")
    assert not hasattr(stand_in, "__path_of_nothing__")
    assert "fastecdsa.keys.sign" in repr(taken)
    assert {taken: 1}[taken] == 1


def test_libp2p_cannot_make_or_check_a_key_with_it() -> None:
    ecc: Any = importlib.import_module("libp2p.crypto.ecc")
    uses: tuple[Callable[[], object], ...] = (
        lambda: ecc.create_new_key_pair("P-256"),
        lambda: ecc.ECCPublicKey.from_bytes(b"\4" * 65, "P-256"),
    )
    for use in uses:
        with pytest.raises(Exception, match="stand-in"):
            use()
