"""libp2p's stream multiplexer, made safe to cancel.

In libp2p 0.8.1 a frame that is cancelled while it is being written leaves half a Noise message on the wire,
or a nonce that was used and never sent: every stream of the connection is then dead, and it shows only
later. Cancellation reaches writes in places nobody would think of, such as a read (it acknowledges what it
took) or a timeout around opening a stream. So a frame, once begun, is finished here or the whole connection
is given up.
"""

from __future__ import annotations

from typing import Any

import structlog
import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID, Yamux

WRITE_TIMEOUT_S = 5.0
"""How long one frame (64 KiB at most) may wait for the other side to take it. Then the other side is gone."""

log = structlog.get_logger(__name__)


class UninterruptedYamux(Yamux):
    """Yamux whose frames cannot be cancelled midway, and whose failure is never its host's."""

    async def start(self) -> None:
        """Serve the connection until it ends.

        libp2p runs this as a task of the host, and an exception in such a task ends the host. Here it ends
        the connection.
        """
        try:
            await super().start()
        except Exception as error:  # whatever libp2p did not expect to be sent
            log.warning("connection_failed", reason=f"{type(error).__name__}: {error}")
            with trio.CancelScope(shield=True, deadline=trio.current_time() + WRITE_TIMEOUT_S):
                await self._cleanup_on_error()
        finally:
            self.event_started.set()  # somebody may be waiting for this connection to have started

    async def _write_frame(self, data: bytes) -> None:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(WRITE_TIMEOUT_S) as patience:
                await super()._write_frame(data)
            if patience.cancelled_caught:
                await self._abandon()
                raise ConnectionClosedError("the other side does not take what is sent", transport="tcp")

    async def _abandon(self) -> None:
        """Close the socket under the connection: the reading side then sees the end and cleans up."""
        log.info("connection_abandoned", reason="a write did not finish in time")
        with trio.move_on_after(WRITE_TIMEOUT_S):
            await self.secured_conn.close()


class _OnlyUninterrupted(MuxerMultistream):
    """Negotiates our Yamux. libp2p's own negotiates whatever it is given and then makes its own Yamux
    anyway.
    """

    async def new_conn(self, conn: Any, peer_id: ID) -> UninterruptedYamux:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = UninterruptedYamux(conn, peer_id, is_initiator=conn.is_initiator)
        self._annotate_connection(muxed, conn, protocol)
        return muxed


def use_uninterrupted_yamux(swarm: Swarm) -> None:
    """Make every later connection of this libp2p swarm use `UninterruptedYamux`, and no other multiplexer."""
    swarm.upgrader.muxer_multistream = _OnlyUninterrupted({PROTOCOL_ID: UninterruptedYamux})
