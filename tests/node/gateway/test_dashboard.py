"""The dashboard's page and document over HTTP: who gets them, what they may cost, what a browser may run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import trio
import trio.testing

from kvasir_node.gateway.dashboard import KEPT_S, MEMBERS_MAX, MISSING_RANGES_MAX, DashboardPage
from kvasir_node.gateway.doors import Doors
from kvasir_node.gateway.ports import Standing
from tests.node.gateway.test_gateway import CHAT, asked
from tests.node.gateway.test_http_server import connected
from tests.node.gateway.toy_status import OWN, many, member, node_id, six, status
from tests.node.gateway.toy_swarm import MODEL, PROVENANCE, ToyGateway

TOKEN = "a token of this gateway".replace(" ", "-")
LOCKED = Doors("192.0.2.1", TOKEN)
MEMBER_BYTES_MAX = 2048


class Elements(HTMLParser):
    """Every element with its attributes, and the text of styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            assert self.cdata_elem not in self.inline, f"a second <{self.cdata_elem}> would not be run"
            self.inline[self.cdata_elem] = data


PAGE = DashboardPage()
ELEMENTS = Elements(PAGE.body.decode())


async def test_the_page_is_for_everybody_and_what_it_asks_for_is_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for doors in (Doors("127.0.0.1"), LOCKED):
        async with connected(ToyGateway(doors=doors).server) as client:
            answer = await client.ask("GET", "/")
        assert (answer.status, answer.body) == (200, PAGE.body)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
    for given, status_code in ((f"Bearer {TOKEN}", 200), (f"Bearer {TOKEN}x", 401), ("", 401)):
        async with connected(ToyGateway(doors=LOCKED).server) as client:
            answer = await client.ask("GET", "/status", authorization=given)
        assert answer.status == status_code
        assert (OWN in answer.body.decode()) is (status_code == 200)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80"])
async def test_a_strangers_name_gets_no_page(autojump_clock: trio.testing.MockClock, host: str) -> None:
    for path in ("/", "/status"):
        async with connected(ToyGateway().server) as client:
            assert (await client.ask("GET", path, host=host)).status == 403


def test_the_policy_names_this_style_and_this_script_and_nothing_else() -> None:
    policy = dict(PAGE.headers)["Content-Security-Policy"]
    directives = dict(each.split(" ", 1) for each in policy.split("; "))
    digests = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in ELEMENTS.inline.items()
    }
    assert directives == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digests['style']}'",
        "script-src": f"'sha256-{digests['script']}'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_the_page_needs_nothing_but_itself() -> None:
    for tag, attributes in ELEMENTS.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (
            tag,
            attributes,
        )
        assert not {"src", "srcset", "action", "formaction", "ping"} & set(attributes), (tag, attributes)
        if href := attributes.get("href"):
            assert href.startswith(("#", "data:image/svg+xml,")), href
    script = ELEMENTS.inline["script"]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
        "cookie",
    ):
        assert word not in script, word
    namespace = "http://www.w3.org/2000/svg"
    assert not re.search(r"https?://|url\(|@import", PAGE.body.decode().replace(namespace, ""))
    ids = [attributes["id"] for _, attributes in ELEMENTS.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    asked_for = set(re.findall(r'\bat\("([^"]+)"\)', script))
    assert asked_for <= set(ids), asked_for - set(ids)


async def test_the_document_is_the_daemons_status_and_what_the_gateway_adds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    toy = ToyGateway()
    await asked(toy, CHAT, max_tokens=4)
    async with connected(toy.server) as client:
        answer = await client.ask("GET", "/status")
    assert answer.headers["content-type"] == "application/json"
    assert answer.document == {
        "schema_version": 1,
        "status": six(),
        "members_left_out": 0,
        "missing_left_out": 0,
        "gateway": {
            "model": "demo",
            "has_chat_template": True,
            "obstacle": "",
            "answers_now": 0,
            "generated_tokens_total": 4,
        },
    }


@pytest.mark.parametrize(
    "standing, model, obstacle",
    [
        (Standing(None, None), None, "this node does not know its swarm's model yet"),
        (Standing(MODEL, PROVENANCE, "nobody is backbone"), "demo", "nobody is backbone"),
    ],
)
async def test_why_nothing_can_be_served_is_said(
    autojump_clock: trio.testing.MockClock, standing: Standing, model: str | None, obstacle: str
) -> None:
    toy = ToyGateway()
    toy.swarm.now = standing
    async with connected(toy.server) as client:
        said = (await client.ask("GET", "/status")).document["gateway"]
    assert (said["model"], said["obstacle"]) == (model, obstacle)
    refused = await asked(toy, CHAT)
    assert refused.document["error"]["message"] == obstacle, "in the words that a client hears"


async def test_a_large_swarm_makes_no_larger_document(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    said = many(2000)
    said["members"] += [member(5000, ranks=["bulk"], state="dead")]
    missing: list[dict[str, Any]] = [
        {"layer": layer, "first": 0, "end": 16, "reason": "x" * 1024} for layer in range(1024)
    ]
    said["plan"]["coverage"]["missing"] = missing
    toy.swarm.said = said
    async with connected(toy.server) as client:
        answer = await client.ask("GET", "/status")
    shown = answer.document["status"]["members"]
    assert len(shown) == MEMBERS_MAX
    assert answer.document["members_left_out"] == 2000 - MEMBERS_MAX
    assert all(each["ranks"] for each in shown), "whoever has a part in the plan comes first"
    assert answer.document["status"]["plan"]["coverage"]["missing"] == missing[:MISSING_RANGES_MAX]
    assert answer.document["missing_left_out"] == 1024 - MISSING_RANGES_MAX
    assert len(answer.body) < MEMBERS_MAX * MEMBER_BYTES_MAX
    assert len(said["members"]) == 2000, "what the daemon said is left as it was"


async def test_however_many_ask_it_is_made_once_a_moment(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    async with connected(toy.server) as client:
        for _ in range(5):
            await client.ask("GET", "/status")
        assert toy.swarm.n_asked == 1
        toy.swarm.said = status([], reason="another")
        await trio.sleep(KEPT_S)
        answer = await client.ask("GET", "/status")
    assert (toy.swarm.n_asked, answer.document["status"]["reason"]) == (2, "another")


async def test_words_that_are_no_text_at_all_make_a_document_all_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:
    toy = ToyGateway()
    toy.swarm.said = status([member(2, reason="half a \ud83d character")], reason='"</script>\u2028')
    async with connected(toy.server) as client:
        said = json.loads((await client.ask("GET", "/status")).body)["status"]
    assert said["members"][0]["node_id"] == node_id(2)
    assert said["reason"] == '"</script>\u2028'
