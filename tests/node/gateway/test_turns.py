"""Which requests share turns, and which addresses count as one."""

from __future__ import annotations

import pytest

from kvasir_node.gateway.turns import address_group, whose_turn


@pytest.mark.parametrize(
    "address, group",
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.0.0.1", None),
        ("127.9.9.9", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("", None),
    ],
)
def test_what_counts_as_one_address(address: str, group: str | None) -> None:
    assert address_group(address) == group
    turns = {whose_turn(address, user) for user in ("", "ann", "bob")}
    # Elsewhere a name is only a name.
    assert len(turns) == (3 if group is None else 1)
    assert all(0 < len(each) <= 64 and "ann" not in each for each in turns)


def test_one_user_has_one_turn() -> None:
    assert whose_turn("::1", "ann") == whose_turn("::1", "ann")
