"""The dashboard in a real Chromium: what people see, by keyboard, on a phone, as a screen reader has it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvasir_node.cli.status import _STYLES, reason_of, word_of
from kvasir_node.gateway.doors import Doors
from kvasir_node.gateway.ports import CompletionRefused, Standing
from kvasir_proto.errors import EngineFailed
from tests.loopback.chromium import Chromium, Page, chromium
from tests.node.gateway.toy_status import N_LAYER, OWN, layers, many, member, node_id, six, status
from tests.node.gateway.toy_swarm import MODEL, PROVENANCE, Script, ToyGateway

__all__ = ["chromium"]
pytestmark = [pytest.mark.loopback, pytest.mark.slow]

DRAWN: Final = "document.querySelector('#picture svg')"
FLOWS: Final = "document.querySelectorAll('.flow').length"
ANSWERED: Final = "document.getElementById('chat-announced').textContent"
TOKEN: Final = "a-token-of-this-gateway"
HOSTILE: Final = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>{{9*9}}' + "W" * 300
QUICK_POLLS: Final = """
    window.waits = [];
    const setTimeoutAsIs = window.setTimeout;
    window.setTimeout = (what, wait) => {
        window.waits.push(wait);
        return setTimeoutAsIs(what, Math.min(wait, 10));
    };
"""
"""Before the page's own script: waits are noted, and short."""
CELLS: Final = "map((row) => [...row.children].map((each) => each.innerText))"
CARDS: Final = """
    [...document.querySelectorAll('#picture g')].map((card) =>
        [...card.querySelectorAll('text')].map((text) => text.textContent).join(' | '))
"""
MISPLACED: Final = """
    (() => {
        const { width, height } = document.querySelector('#picture svg').viewBox.baseVal;
        const boxes = [...document.querySelectorAll('#picture g')].map((card) => card.getBBox());
        const isOutside = (box) =>
            box.x < 0 || box.y < 0 || box.x + box.width > width || box.y + box.height > height;
        const meet = (one, other) =>
            one.x < other.x + other.width && other.x < one.x + one.width
            && one.y < other.y + other.height && other.y < one.y + one.height;
        return boxes.filter((one, index) =>
            isOutside(one) || boxes.some((other, second) => second > index && meet(one, other))).length;
    })()
"""
SMALLEST_TEXT: Final = """
    Math.min(...[...document.querySelectorAll('#picture text')].map((text) =>
        parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))
"""
WORDS: Final = """
    [...document.querySelectorAll('#member-rows tr')].slice(1).map((row) => [
        row.querySelector('.id').title,
        row.querySelector('.state').classList[1],
        row.querySelector('.state').lastChild.textContent,
        row.querySelector('.why')?.textContent ?? ''])
"""
FOCUS: Final = """
    [document.activeElement].map((each) => [each.id || each.hash || each.localName, getComputedStyle(each)])
        .map(([name, { outlineStyle, outlineWidth }]) =>
            [name, outlineStyle !== 'none' && parseFloat(outlineWidth) >= 2])[0]
"""
MAKE_HTML: Final = """
    (() => {
        try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch (error) { return error.name; }
    })()
"""
AXE: Final = """
    axe.run(document, { resultTypes: ['violations'] }).then((all) => all.violations.map((each) =>
        [each.id, each.help, each.nodes.slice(0, 3).map((node) => `${node.html} ${node.failureSummary}`)]))
"""


@contextlib.asynccontextmanager
async def served(toy: ToyGateway, port: int = 0) -> AsyncIterator[str]:
    """The dashboard's address, as long as the gateway runs."""
    listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(toy.server.serve, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/"
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def shown(
    chromium: Chromium, toy: ToyGateway, width: int = 1280, until: str = DRAWN, **media: str
) -> AsyncIterator[Page]:
    """The dashboard of a swarm, drawn; at the end nothing has gone wrong in it and nobody else was asked."""
    features = {name.replace("_", "-"): value for name, value in media.items()}
    async with served(toy) as address, chromium.page(width, media=features) as page:
        await page.go(address)
        await page.wait_for(until)
        yield page
        assert page.faults == []
        assert {each for each in page.addresses if not each.startswith(("data:", address))} == set()


async def rows_of(page: Page, body: str) -> list[list[str]]:
    """A table, as it is read."""
    rows: list[list[str]] = await page.evaluate(f"[...document.querySelectorAll('#{body} tr')].{CELLS}")
    return rows


async def texts_of(page: Page, selector: str) -> list[str]:
    """What each of these elements says."""
    texts: list[str] = await page.evaluate(
        f"[...document.querySelectorAll('{selector}')].map((each) => each.textContent)"
    )
    return texts


async def cards_of(page: Page) -> list[str]:
    """The texts of each card in the picture, this node's first."""
    cards: list[str] = await page.evaluate(CARDS)
    return cards


async def ask(page: Page, words: str) -> str:
    """Say something in the chat; what is announced when it is answered."""
    await page.evaluate("document.getElementById('chat-announced').textContent = ''")
    await page.evaluate("document.getElementById('words').focus()")
    await page.type(words)
    await page.press("Enter")
    await page.wait_for(ANSWERED)
    announced: str = await page.evaluate(ANSWERED)
    return announced


async def test_six_members_are_shown_with_what_each_is(chromium: Chromium) -> None:
    async with shown(chromium, ToyGateway()) as page:
        assert await page.evaluate("document.title") == "Kvasir: ready"
        assert await page.evaluate("document.getElementById('notice').hidden")
        cards = await cards_of(page)
        assert cards[0] == "ready | this node | backbone | ggml-cuda · F32 · ✓ verified"
        assert f"suspect | …{node_id(5)[-8:]} | bulk | opencl · F16 · claimed" in cards
        assert len(cards) == 6
        links = await page.evaluate(
            "[...document.querySelectorAll('.link')].map((each) => each.classList[1])"
        )
        assert sorted(links) == ["direct"] * 4 + ["indirect"]
        times = await texts_of(page, "#picture .rtt")
        assert sorted(times) == ["", "0.4 ms", "1.3 ms", "31 ms", "8.7 ms"]
        rows = {row[0]: row for row in await rows_of(page, "member-rows")}
        assert next(iter(rows)) == f"this node …{OWN[-8:]}"
        assert rows[f"…{node_id(3)[-8:]}"][1:] == [
            *(
                "●\nserving",
                "output, bulk",
                "ggml-hip",
                "F32",
                "claimed",
                "38",
                "1.3 ms",
                "direct",
                "400 ms ago",
                "yes",
            ),
        ]
        assert rows[f"…{node_id(5)[-8:]}"][1] == "▲\nsuspect\nit has not answered for 1.2 s"
        assert len(await texts_of(page, "#cells > *")) == N_LAYER


@pytest.mark.parametrize(
    "standing, changes, expected",
    [
        (
            Standing(None, None),
            {"state": "joining", "reason": "no member answers at 192.0.2.1", "model": None},
            [
                "Not ready: this node does not know its swarm's model yet",
                "Joining: no member answers at 192.0.2.1",
            ],
        ),
        (
            Standing(MODEL, PROVENANCE, "4 of 192 experts have no holder"),
            {"state": "joining", "reason": "4 of 192 experts have no holder"},
            ["Not ready: 4 of 192 experts have no holder"],
        ),
        (
            Standing(MODEL, PROVENANCE),
            {"state": "degraded", "reason": "no F32 node is left", "clock_offset_s": -700.0},
            ["Degraded: no F32 node is left", "Clock: 700 s ahead of most members: set it right"],
        ),
    ],
)  # fmt: skip
async def test_why_something_is_not_ready(
    chromium: Chromium, standing: Standing, changes: dict[str, Any], expected: list[str]
) -> None:
    toy = ToyGateway()
    toy.swarm.now = standing
    toy.swarm.said = six(**changes)
    async with shown(chromium, toy) as page:
        lines = (await page.text_of("#notice")).splitlines()
        assert [line[2:] for line in lines if line] == expected
        assert (
            await page.evaluate("document.getElementById('announced').textContent")
            == f"This node is {changes['state']}."
        )
        if standing.why_not_ready:
            assert standing.why_not_ready in await page.text_of("#said")
            assert standing.why_not_ready in await ask(page, "Hello?"), "in the words that the API has"
            assert await page.evaluate("document.getElementById('words').value") == "Hello?", (
                "to be sent again"
            )


async def test_coverage_is_told_by_layer_and_not_by_colour(chromium: Chromium) -> None:
    toy = ToyGateway()
    said = six()
    said["plan"]["coverage"] |= {
        "n_pairs_held": 188,
        "by_backbone": 24,
        "layers": layers(layer_3=(4, 0), layer_10=(0, 16), layer_11=(0, 8)),
        "missing": [{"layer": 3, "first": 4, "end": 8, "reason": "none of its holders is there"}],
    }
    toy.swarm.said = said
    async with shown(chromium, toy) as page:
        cells = await texts_of(page, "#cells > *")
        assert cells == [*"012", "3 !", *"456789", "10 b", "11 b"]
        assert (await page.text_of("#missing")) == "! Layer 3, experts 4 to 7: none of its holders is there"
        await page.evaluate("document.querySelector('#coverage summary').focus()")
        await page.press("Enter")
        table = await rows_of(page, "coverage-rows")
        assert table == [
            ["0 to 2", "16", "covered"],
            ["3", "16", "4 without a holder"],
            ["4 to 9", "16", "covered"],
            ["10", "16", "16 by the backbone alone"],
            ["11", "16", "8 by the backbone alone"],
        ]
        assert "188 of 192 experts held" in await page.text_of("#coverage-about")
        assert "97.9 %" in await page.text_of("#figures")


def verdict(word: str, ends: str) -> dict[str, Any]:
    return {"word": word, "reason": "wrong rows", "ends": ends, "electors": 2}


async def test_a_members_word_and_reason_are_those_of_the_status_command(chromium: Chromium) -> None:
    anew = "with another certificate"
    choices = itertools.product(
        [("alive", each) for each in ("well", "conflicted", "clock_wrong", "slow")]
        + [("dead", "well"), ("left", "well")],
        [None, "loading", "unreachable", "refused", "quarantined"],
        [
            (None, None),
            (None, 90.0),
            (verdict("unfit", anew), None),
            (verdict("quarantined", anew), 0.0),
            (verdict("quarantined", "with its time"), 90.0),
        ],
        [["bulk"], []],
    )
    members = [
        member(
            number,
            state=state,
            condition=condition,
            holder_state=holder,
            verdict=said,
            quarantined_s=left,
            ranks=ranks,
            reason=f"reason {number}",
            said_state="standby" if number % 2 else "ready",
        )
        for number, ((state, condition), holder, (said, left), ranks) in enumerate(choices, 2)
    ]
    members += [
        member(1000, audit={"verdict": "unfit", "reason": "F16", "rows": 1, "foreign": 1, "rows_asked": 9}),
        member(1001, holder_state=None, said_state=None),
    ]
    colours = {"green": "is-well", "yellow": "is-warn", "red": "is-bad", "": "is-plain"}
    toy = ToyGateway()
    toy.swarm.said = status(members)
    async with shown(chromium, toy) as page:
        await page.evaluate("document.getElementById('more-members').click()")
        read = await page.evaluate(WORDS)
        assert len(read) == len(members)
        by_id = {each["node_id"]: each for each in members}
        for name, level, word, why in read:
            each = by_id[name]
            assert (word, level) == (word_of(each), colours[_STYLES.get(word, "")])
            assert why == ("" if level == "is-well" else reason_of(each))
        times = [row[7] for row in (await rows_of(page, "member-rows"))[1:]]
        is_gone = [by_id[name]["state"] in ("dead", "left") for name, *_ in read]
        assert [time == "unknown" for time in times] == is_gone, "what it was is of no use"


async def test_what_others_say_is_text_and_never_html(chromium: Chromium) -> None:
    toy = ToyGateway(Script(HOSTILE.encode()))
    members = [
        member(
            2, backend=HOSTILE, device=HOSTILE, accumulation=HOSTILE, said_state=HOSTILE, holder_state=None
        ),
        member(3, state="dead", reason=HOSTILE, certificate=HOSTILE, addresses=[HOSTILE]),
    ]
    said = status(
        members,
        state="degraded",
        reason=HOSTILE,
        last_error=HOSTILE,
        last_error_at="now",
        addresses=[HOSTILE],
    )
    said["plan"]["degraded"] = HOSTILE + "!"
    said["plan"]["coverage"]["missing"] = [{"layer": 0, "first": 0, "end": 1, "reason": HOSTILE}]
    toy.swarm.said = said
    toy.swarm.now = Standing(replace(MODEL, name=HOSTILE[:60], context_tokens=4096), PROVENANCE)
    async with shown(chromium, toy, 360) as page:
        await ask(page, HOSTILE)
        for place in ("#notice", "#picture", "#missing", "#member-rows", "#whose", "#about", "#said"):
            assert "<img src=x" in await page.evaluate(f"document.querySelector('{place}').textContent"), (
                place
            )
        assert await page.evaluate("document.querySelectorAll('img, body script ~ script').length") == 0
        assert await page.evaluate("window.hit") is None
        assert await page.evaluate("document.documentElement.scrollWidth") == 360


async def test_the_page_itself_could_not_make_html_of_a_text(chromium: Chromium) -> None:
    async with served(ToyGateway()) as address, chromium.page() as page:
        await page.go(address)
        outcome = await page.evaluate(MAKE_HTML)
        assert outcome == "TypeError"
        await page.evaluate(
            "document.body.append(Object.assign(document.createElement('style'), {textContent: 'a{}'}))"
        )
        await page.wait_for("true")
        assert any("Content Security Policy" in each for each in page.faults)


async def test_a_chat_streams_and_goes_on(chromium: Chromium) -> None:
    toy = ToyGateway(Script(b"Hello there", interval_s=0.02))
    async with shown(chromium, toy) as page:
        await page.evaluate("document.getElementById('words').focus()")
        await page.type("Hi")
        await page.press("Enter", shift=True)
        assert toy.completions.requests == [], "Shift and Enter begins a new line"
        await page.type("again")
        await page.press("Enter")
        await page.wait_for("/^He/.test(document.querySelectorAll('#said .words')[1]?.textContent)")
        assert not await page.evaluate(ANSWERED)
        assert not await page.evaluate("document.getElementById('stop').hidden")
        await page.wait_for(ANSWERED)
        announced = await page.evaluate(ANSWERED)
        assert announced.startswith("Answered: 12 tokens, ")
        assert " tokens/s, the first after " in announced
        assert announced.endswith("; ended by itself.")
        assert (
            await page.evaluate("document.querySelectorAll('#said .words')[1].textContent") == "Hello there"
        )
        await ask(page, "More")
        prompts = [bytes(each.token_ids).decode() for each in toy.completions.requests]
        assert prompts == ["user: Hi\nagain", "user: Hi\nagain\nassistant: Hello there\nuser: More"]
        assert toy.completions.requests[0].sampling.draw.temperature == 0.7
        await page.evaluate("document.getElementById('forget').click()")
        await ask(page, "Anew")
        assert bytes(toy.completions.requests[2].token_ids) == b"user: Anew"


async def test_an_answer_is_stopped_by_keyboard_and_its_session_with_it(chromium: Chromium) -> None:
    toy = ToyGateway(Script(b"abcdefgh" * 8, interval_s=0.05))
    async with shown(chromium, toy) as page:
        await page.evaluate("document.getElementById('words').focus()")
        await page.type("Go on")
        for _ in range(4):
            await page.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "send"
        left = toy.completions.next_left
        await page.press("Enter")
        await page.wait_for("document.querySelectorAll('#said .words')[1]?.textContent.length > 2")
        assert await page.evaluate("document.activeElement.id") == "stop", (
            "where the button was that was pressed"
        )
        await page.press("Enter")
        with trio.fail_after(30):
            await left.wait()
        await page.wait_for(ANSWERED)
        assert "stopped" in await page.evaluate(ANSWERED)
        assert await page.evaluate("document.activeElement.id") == "words"


@pytest.mark.parametrize(
    "script, expected",
    [
        (Script(refusal=CompletionRefused("64 wait", "busy", 7.0)), "64 wait (try again in 7 s)"),
        (Script(b"Half", error=EngineFailed("the engine has ended")), "the engine has ended"),
    ],
)  # fmt: skip
async def test_errors_are_shown_as_they_are(chromium: Chromium, script: Script, expected: str) -> None:
    async with shown(chromium, ToyGateway(script)) as page:
        assert await ask(page, "Hi") == expected
        assert await page.text_of("#said .failure") == expected
        assert script.text.decode() in await page.text_of("#said") or script.refusal is not None


async def test_a_model_without_a_chat_template_continues_texts(chromium: Chromium) -> None:
    toy = ToyGateway(Script(b" a time"))
    toy.swarm.now = Standing(replace(MODEL, chat_template=None), PROVENANCE)
    async with shown(chromium, toy) as page:
        await ask(page, "Once upon")
        assert bytes(toy.completions.requests[0].token_ids) == b"Once upon"
        assert " a time" in await page.text_of("#said")


async def test_nothing_is_shown_without_the_token_and_it_is_kept_in_this_tab_only(chromium: Chromium) -> None:
    toy = ToyGateway(doors=Doors("127.0.0.1", TOKEN))
    async with shown(chromium, toy, until="!document.getElementById('key').hidden") as page:
        text = await page.text_of("body")
        assert OWN[-8:] not in text
        assert "Members" in text, "the way to it"
        assert "token needed" in text
        for given, until in (
            ("another-token-altogether", "document.getElementById('key-answer').textContent"),
            (TOKEN, DRAWN),
        ):
            await page.wait_for("document.activeElement.id === 'token'")
            await page.type(given)
            await page.press("Enter")
            await page.wait_for(until)
        assert await page.evaluate(
            "[localStorage.length, document.cookie, location.search, location.hash]"
        ) == [0, "", "", ""]
        assert await page.evaluate("Object.values(sessionStorage)") == [TOKEN]
        assert "Hello" in await page.evaluate("document.title") or await ask(page, "Hi")
        assert len(toy.completions.requests) == 1, "the chat sends it too"
        await page.evaluate("document.getElementById('forget-token').click()")
        await page.wait_for("document.readyState === 'complete' && !document.getElementById('key').hidden")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_a_keyboard_reaches_everything_in_the_order_it_is_read(chromium: Chromium) -> None:
    async with shown(chromium, ToyGateway()) as page:
        reached = []
        for _ in range(13):
            await page.press("Tab")
            name, is_visible = await page.evaluate(FOCUS)
            assert is_visible, f"{name} does not show that it has the focus"
            reached.append(name)
        assert reached == [
            *("#main", "#picture-box", "#coverage", "#chat", "#members", "summary", "said", "words"),
            *("mode", "tokens-max", "temperature", "send", "forget"),
        ]


@pytest.mark.parametrize("count", [1, 6, 30, 300])
async def test_a_phone_never_scrolls_sideways_and_the_picture_stays_readable(
    chromium: Chromium, count: int
) -> None:
    toy = ToyGateway()
    toy.swarm.said = six() if count == 6 else many(count)
    async with shown(chromium, toy, 360) as page:
        for width in (360, 820, 1280):
            await page.resize(width, 800)
            await page.wait_for(f"{DRAWN}.viewBox.baseVal.width > {width} / 3")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert 1 <= len(await cards_of(page)) <= 13
            assert await page.evaluate(MISPLACED) == 0
            assert await page.evaluate(SMALLEST_TEXT) > 11.5, "in pixels of the screen"
        names = [card.split(" | ")[1] for card in await cards_of(page)]
        told = sum(int(name.split()[0]) if "members" in name else 1 for name in names)
        assert told == count, "nobody is left out of the picture"


async def test_one_swarm_is_drawn_in_one_way(chromium: Chromium) -> None:
    drawn = []
    for members in (many(40)["members"], many(40)["members"][::-1]):
        toy = ToyGateway()
        toy.swarm.said = status(members)
        async with shown(chromium, toy) as page:
            drawn.append(await page.evaluate(f"{DRAWN}.outerHTML"))
            ranks = [card.split(" | ")[2] for card in await cards_of(page)]
            assert list(dict.fromkeys(ranks)) == ["backbone", "output + bulk", "bulk", "no part in the plan"]
    assert drawn[0] == drawn[1]


async def test_a_daemon_that_is_gone_is_said_to_be_and_found_again(chromium: Chromium) -> None:
    async with chromium.page() as page:
        await page.before_load(QUICK_POLLS)
        async with served(ToyGateway()) as address:
            await page.go(address)
            await page.wait_for(DRAWN)
            await page.wait_for("window.waits.length > 2")
            assert set(await page.evaluate("window.waits.slice(0, 3)")) == {2000}
            await page.evaluate(
                "Object.defineProperty(document, 'hidden', { value: true, configurable: true })"
            )
            await page.wait_for("window.waits.at(-1) === 30000")
            await page.evaluate("delete document.hidden")
            await page.wait_for("window.waits.at(-1) === 2000")
        await page.wait_for("!document.getElementById('silence').hidden && window.waits.at(-1) === 30000")
        waits = await page.evaluate("window.waits")
        assert list(dict.fromkeys(waits[len(waits) - waits[::-1].index(2000) - 1 :])) == [
            2000,
            4000,
            8000,
            16000,
            30000,
        ]
        assert (await page.text_of("#silence")).startswith("The daemon does not answer since ")
        assert await page.evaluate("document.title") == "Kvasir: no answer"
        assert await page.evaluate(DRAWN + " !== null"), "what was known is there to be read"
        async with served(ToyGateway(), int(address.rstrip("/").rpartition(":")[2])):
            await page.wait_for(
                "document.getElementById('silence').hidden && document.title === 'Kvasir: ready'"
            )


async def test_links_to_holders_move_while_an_answer_is_made_unless_that_is_unwanted(
    chromium: Chromium,
) -> None:
    async with served(ToyGateway(Script(b"ab", interval_s=1000.0))) as address, chromium.page() as page:
        await page.before_load(QUICK_POLLS)
        await page.go(address)
        await page.wait_for(DRAWN)
        assert await page.evaluate("document.getAnimations().length") == 0
        await page.evaluate("document.getElementById('words').focus()")
        await page.type("Hi")
        await page.press("Enter")
        # Five others, one of which holds nothing.
        await page.wait_for(f"{FLOWS} === 4 && document.getAnimations().length === 4")
        await page.emulate({"prefers-reduced-motion": "reduce"})
        await page.wait_for(f"{FLOWS} === 4 && document.getAnimations().length === 0")
        await page.evaluate("document.getElementById('stop').click()")
        await page.wait_for(f"{FLOWS} === 0")


async def test_tokens_a_second_are_those_that_were_counted(chromium: Chromium) -> None:
    toy = ToyGateway(Script(b"x" * 50, interval_s=0.0))
    async with served(toy) as address, chromium.page() as page:
        await page.before_load("Date.now = () => (window.now ?? 1e12);" + QUICK_POLLS)
        await page.go(address)
        await page.wait_for(DRAWN)
        figure = "document.querySelector('#figure-list .figure').textContent"
        assert await page.evaluate(figure) == "…"
        await ask(page, "Hi")
        await page.evaluate("window.now = 1e12 + 8000")
        # 51 tokens with the one that ends the text, in 8 s; the document is as old as a second.
        await page.wait_for(f"{figure} === '6.4'")


def axe() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-core is not here: `make browser`")
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("width, scheme", [(360, "dark"), (1280, "light")])
async def test_axe_finds_nothing(chromium: Chromium, width: int, scheme: str) -> None:
    rules = axe()
    toy = ToyGateway(Script(b"Half", error=EngineFailed("the engine has ended")))
    said = six(state="degraded", reason="no F32 node is left", last_error="lost", last_error_at="now")
    said["members"].append(member(7, state="dead", reason="gone"))
    said["plan"]["coverage"] |= {
        "layers": layers(layer_3=(4, 0), layer_11=(0, 8)),
        "missing": [{"layer": 3, "first": 4, "end": 8, "reason": "none of its holders is there"}],
    }
    toy.swarm.said = said
    async with shown(chromium, toy, width, prefers_color_scheme=scheme) as page:
        await ask(page, "Hi")
        await page.evaluate("document.querySelector('#coverage details').open = true")
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(14, 20, 25)") is (scheme == "dark")
        await page.evaluate(f"{rules}; 0")
        found = await page.evaluate(AXE)
        assert found == [], json.dumps(found, indent=1)


async def test_a_screen_reader_is_told_what_everything_is(chromium: Chromium) -> None:
    async with shown(chromium, ToyGateway(), 360) as page:
        tree = [
            (each["role"]["value"], each.get("name", {}).get("value", ""))
            for each in await page.accessibility_tree()
        ]
        assert {
            ("heading", "Kvasir"),
            ("navigation", "Sections"),
            ("main", ""),
            ("table", "Members"),
            ("log", "Chat"),
            ("textbox", "Message"),
            ("combobox", "Kind"),
            ("spinbutton", "Tokens, max."),
            ("spinbutton", "Temperature"),
            ("button", "Send"),
            ("DisclosureTriangle", "As a table"),
            ("image", "Swarm this node and 5 others; all in the table"),
        } <= set(tree)
        # A table whose rows are stacked on a phone is a table all the same.
        assert sum(role == "columnheader" for role, _ in tree) == 11
        assert sum(role == "rowheader" for role, _ in tree) == 6
        assert sum(role == "cell" for role, _ in tree) == 60
        assert not [
            name for role, name in tree if role in ("textbox", "button", "link", "image") and not name
        ]
