"""What the families must and must not be able to say."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import pytest

from kvasir_proto.limits import FilePath
from kvasir_proto.messages import Family
from kvasir_proto.messages.engine import ENGINE
from kvasir_proto.messages.local import LOCAL
from kvasir_proto.messages.swarm import SWARM
from tests.proto.declared import FAMILIES, MEMBER_IDS, MEMBERS


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
def test_kind_is_the_name_of_the_class_where_there_is_no_other_reason(
    family: Family[Any], member: type[Any]
) -> None:
    by_class = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", member.__name__).lower()
    exceptions = {"engine_binding": "engine", "capability_record": "capability"}
    assert member.kind == exceptions.get(by_class, by_class)
    assert family.by_kind[member.kind] is member


def test_signable_kinds_are_distinct() -> None:
    """A signature names a kind and not a family, so no two families may share one that is signed."""
    signable = [member.kind for family in FAMILIES[4:] for member in family.members]
    assert len(set(signable)) == len(signable)


def test_paths_stay_on_this_machine() -> None:
    said = {
        family.name
        for family, member in MEMBERS
        if FilePath in get_type_hints(member, include_extras=True).values()
    }
    assert said == {ENGINE.name, LOCAL.name}


def test_no_node_can_be_told_a_routing_choice_a_weight_or_a_program() -> None:
    """Invariants 1 and 9: what such a message would have to be called does not exist between nodes."""
    words = {
        "router",
        "weights",
        "offset",
        "pointer",
        "path",
        "graph",
        "tensor",
        "program",
        "logits",
        "experts",
    }
    names = {name for member in SWARM.members for name in get_type_hints(member)}
    assert not {name for name in names if words.intersection(name.split("_"))}
