"""Which addresses are tried, in which order, and when again."""

from __future__ import annotations

import itertools

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.net.dialler import Dialler, DiallerOptions, address_of, grouped_by_node
from kvasir_proto.errors import TransportUnavailable
from kvasir_proto.ids import NodeId
from tests.node.driver.memory_network import DIAL_TIMEOUT_S, MemoryHost, MemoryNetwork, MemoryStream
from tests.node.driver.twins import node_key, node_of

HERE, THERE, OTHER = (node_of(node_key(each)) for each in range(3))


def at(host: str, node_id: NodeId = THERE, port: int = 4001) -> str:
    return f"/ip4/{host}/tcp/{port}/p2p/{node_id}"


async def serve(_node_id: NodeId, _stream: MemoryStream) -> None:
    await trio.sleep_forever()


class Recorder:
    """A host that notes what it is asked to dial, and how many at once."""

    def __init__(self, *, takes_s: float = 0.0, fails: bool = False, address: str = "192.0.2.1") -> None:
        self.node_id = HERE
        self.asked: list[tuple[str, ...]] = []
        self.at_once = 0
        self.at_once_max = 0
        self._takes_s = takes_s
        self._fails = fails
        self._address = address
        self.up: set[NodeId] = set()

    def addresses(self) -> tuple[str, ...]:
        return (at(self._address, HERE),)

    def is_connected(self, node_id: NodeId) -> bool:
        return node_id in self.up

    async def connect(self, address: object) -> NodeId:
        assert isinstance(address, tuple)
        self.asked.append(address)
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        await trio.sleep(self._takes_s)
        self.at_once -= 1
        if self._fails:
            raise TransportUnavailable("nobody answers")
        node_id = NodeId(address[0].rpartition("/")[2])
        self.up.add(node_id)
        return node_id


async def test_all_sources_are_tried_the_most_trusted_first() -> None:
    host = Recorder()
    dialler = Dialler(host)
    dialler.learn(THERE, [at("192.0.2.9")], "heard")
    dialler.learn(THERE, [at("192.0.2.8")], "remembered")
    dialler.learn(THERE, [at("192.0.2.7"), at("192.0.2.5")], "told")
    dialler.learn(THERE, [at("192.0.2.6")], "lan")
    dialler.learn(THERE, [at("192.0.2.5")], "record")
    await dialler.reach(THERE)
    assert host.asked == [tuple(at(f"192.0.2.{last}") for last in (5, 6, 7, 8, 9))]
    await dialler.reach(THERE)
    assert len(host.asked) == 1


async def test_what_a_source_says_replaces_what_it_said() -> None:
    dialler = Dialler(Recorder())
    assert dialler.learn(THERE, [at("192.0.2.5", port=1)], "record")
    assert not dialler.learn(THERE, [at("192.0.2.5", port=1)], "record")
    assert dialler.learn(THERE, [at("192.0.2.5", port=2)], "record")
    assert dialler.addresses(THERE) == (at("192.0.2.5", port=2),)
    assert not dialler.learn(THERE, [], "record")
    assert dialler.addresses(THERE) == ()


async def test_failures_postpone_the_next_try_and_news_do_not_wait(autojump_clock: MockClock) -> None:
    host = Recorder(fails=True)
    dialler = Dialler(host, DiallerOptions(retry_first_s=1.0, retry_max_s=8.0))
    dialler.learn(THERE, [at("192.0.2.5")], "told")
    times: list[float] = []
    start = trio.current_time()
    while trio.current_time() - start < 60.0:
        before = len(host.asked)
        with pytest.raises(TransportUnavailable, match="nobody answers"):
            await dialler.reach(THERE)
        if len(host.asked) > before:
            times.append(round(trio.current_time() - start, 1))
        await trio.sleep(0.1)
    gaps = [round(later - sooner) for sooner, later in itertools.pairwise(times)]
    assert gaps[:5] == [1, 2, 4, 8, 8]
    count = len(host.asked)
    dialler.learn(THERE, [at("192.0.2.66")], "heard")
    with pytest.raises(TransportUnavailable):
        await dialler.reach(THERE)
    assert len(host.asked) == count, "what others say does not make us dial"
    dialler.learn(THERE, [at("192.0.2.6")], "record")
    with pytest.raises(TransportUnavailable):
        await dialler.reach(THERE)
    assert len(host.asked) == count + 1
    with pytest.raises(TransportUnavailable):
        await dialler.reach(THERE, insist=True)
    assert len(host.asked) == count + 2


async def test_no_more_than_so_many_are_dialled_at_once(autojump_clock: MockClock) -> None:
    host = Recorder(takes_s=1.0)
    dialler = Dialler(host, DiallerOptions(dials_max=3))
    nodes = [node_of(node_key(each)) for each in range(10, 30)]
    async with trio.open_nursery() as nursery:
        for node_id in nodes:
            dialler.learn(node_id, [at("192.0.2.5", node_id)], "told")
            nursery.start_soon(dialler.reach, node_id)
            nursery.start_soon(dialler.reach, node_id)
    assert host.at_once_max == 3
    assert len(host.asked) == len(nodes)


async def test_those_who_ask_at_once_share_a_failure(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        host = MemoryHost(network, HERE, at("10.0.0.1", HERE))
        dialler = Dialler(host)
        dialler.learn(THERE, [at("10.0.0.2")], "told")
        failed = 0

        async def ask() -> None:
            nonlocal failed
            with pytest.raises(TransportUnavailable):
                await dialler.reach(THERE)
            failed += 1

        started = trio.current_time()
        async with trio.open_nursery() as askers:
            for _ in range(5):
                askers.start_soon(ask)
        assert failed == 5
        assert trio.current_time() - started == DIAL_TIMEOUT_S
        assert len(host.dialled) == 1


async def test_a_node_without_addresses_is_unavailable_at_once() -> None:
    with pytest.raises(TransportUnavailable, match="no address"):
        await Dialler(Recorder()).reach(THERE)


async def test_the_table_and_the_addresses_are_bounded() -> None:
    dialler = Dialler(Recorder(), DiallerOptions(nodes_max=3, addresses_max=2))
    nodes = [node_of(node_key(each)) for each in range(10, 16)]
    for node_id in nodes:
        dialler.learn(node_id, [at(f"192.0.2.{last}", node_id) for last in range(1, 9)], "heard")
    assert dialler.statistics().nodes_known == 3
    assert [len(dialler.addresses(each)) for each in nodes] == [0, 0, 0, 2, 2, 2]


async def test_talk_displaces_nobody_who_is_known_better() -> None:
    dialler = Dialler(Recorder(), DiallerOptions(nodes_max=4))
    dialler.learn(THERE, [at("192.0.2.5")], "told")
    dialler.learn(OTHER, [at("192.0.2.6", OTHER)], "record")
    for each in range(10, 40):
        node_id = node_of(node_key(each))
        dialler.learn(node_id, [at("192.0.2.7", node_id)], "heard")
    assert dialler.statistics().nodes_known == 4
    assert dialler.addresses(THERE)
    assert dialler.addresses(OTHER)


async def test_who_gives_up_early_postpones_the_next_try_too(autojump_clock: MockClock) -> None:
    host = Recorder(takes_s=10.0)
    dialler = Dialler(host)
    dialler.learn(THERE, [at("192.0.2.5")], "told")
    for _ in range(2):
        with pytest.raises((trio.TooSlowError, TransportUnavailable)), trio.fail_after(3.0):
            await dialler.reach(THERE)
    assert len(host.asked) == 1
    assert dialler.statistics().failures == 1


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/192.0.2.1/udp/1",
        "/ip4/192.0.2.1/tcp/0",
        "/ip4/192.0.2.1/tcp/65536",
        "/ip4/0.0.0.0/tcp/1",
        "/ip4/224.0.0.1/tcp/1",
        "/ip4/300.0.0.1/tcp/1",
        "/ip6/192.0.2.1/tcp/1",
        f"/ip4/192.0.2.1/tcp/1/p2p/{OTHER}",
        f"/ip4/192.0.2.1/tcp/1/p2p/{THERE}/p2p-circuit",
        "/unix/etc/passwd",
    ],
)
def test_what_is_no_address_of_the_node_is_left_out(address: str) -> None:
    assert address_of(THERE, address) is None


def test_addresses_get_the_nodes_name() -> None:
    assert address_of(THERE, "/ip6/2001:db8::1/tcp/1") == f"/ip6/2001:db8::1/tcp/1/p2p/{THERE}"
    assert address_of(THERE, at("192.0.2.1")) == at("192.0.2.1")
    assert address_of(THERE, "/dns4/node.example/tcp/1") == f"/dns4/node.example/tcp/1/p2p/{THERE}"


@pytest.mark.parametrize("source", ["record", "lan", "heard"])
async def test_strangers_do_not_send_us_to_our_own_machine(source: str) -> None:
    dialler = Dialler(Recorder())
    local = [at("127.0.0.1"), f"/ip6/::1/tcp/1/p2p/{THERE}", f"/dns4/localhost/tcp/1/p2p/{THERE}"]
    dialler.learn(THERE, [*local, at("192.0.2.5")], source)  # type: ignore[arg-type]
    assert dialler.addresses(THERE) == (at("192.0.2.5"),)
    dialler.learn(OTHER, [at("127.0.0.1", OTHER)], "told")
    assert dialler.addresses(OTHER) == (at("127.0.0.1", OTHER),)
    at_home = Dialler(Recorder(address="127.0.0.1"))
    at_home.learn(THERE, [at("127.0.0.1")], source)  # type: ignore[arg-type]
    assert at_home.addresses(THERE) == (at("127.0.0.1"),)


def test_addresses_are_grouped_by_the_node_they_name() -> None:
    assert grouped_by_node([at("1.1.1.1"), at("1.1.1.2", OTHER), at("1.1.1.3"), "/ip4/1.1.1.4/tcp/1"]) == {
        THERE: (at("1.1.1.1"), at("1.1.1.3")),
        OTHER: (at("1.1.1.2", OTHER),),
    }
