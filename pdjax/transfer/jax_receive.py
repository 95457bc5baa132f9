"""Decode's half of `jax_transfer`: chunks are pulled from the prefill worker's device to this one and verified here."""

from __future__ import annotations

import asyncio
import functools
import logging
import time

import jax

from pdjax.protocol import ChunkHead, ChunkOffer, Peer
from pdjax.transfer.base import ReceivedChunk
from pdjax.transfer.checksum import ChecksumPrograms
from pdjax.transfer.grpc_receive import Lander, RoomFrames, reason, unexpected
from pdjax.transfer.jax_links import PullLink, start_server
from pdjax.transfer.jax_send import TRANSPORT, Endpoint
from pdjax.transfer.rooms import Counters, FailureKind, RoomFault

log = logging.getLogger(__name__)

MAX_LINKS = 32
"""Prefill workers come and go; of the links beyond this many the one that was used longest ago ends behind its last pull."""
_CLOSE_S = 2.0


class PullLander(Lander):
    """Pulls what `ChunkOffer` offers. Used in the sink's event loop, but for `close`.

    A pull whose room has ended goes on by itself, and its array is dropped. While one takes longer than `stall_timeout_s`, as from a
    stopped process, rooms of the same prefill worker fail at once instead of joining the queue behind it.
    """

    transport = TRANSPORT

    def __init__(self, programs: ChecksumPrograms, max_rows: int, endpoint: Endpoint, stall_timeout_s: float) -> None:
        """`max_rows`: the largest chunk that the engine takes. Raises ValueError where transfer servers do not work here."""
        start_server(endpoint.host, endpoint.device)  # better now than in the first request
        self._programs = programs
        self._max_rows = max_rows
        self._endpoint = endpoint
        self._stall_timeout_s = stall_timeout_s
        self._links: dict[Peer, PullLink] = {}

    async def land(self, opening: ChunkHead | ChunkOffer, frames: RoomFrames) -> ReceivedChunk:
        if not isinstance(opening, ChunkOffer):
            raise unexpected(opening, "from a worker that offers chunks")
        if not 1 <= opening.num_pages <= opening.num_rows <= self._max_rows:
            raise RoomFault(
                FailureKind.PROTOCOL, f"chunk of {opening.num_pages} pages in {opening.num_rows} rows, 1 to {self._max_rows} are taken"
            )
        try:
            kv = await self._pull(opening, frames)
        except RoomFault:
            raise
        except Exception as error:  # whatever the library or the device reports ends this room only
            fault = RoomFault(FailureKind.DEVICE, f"pulling pages from {opening.first_page} on failed: {error}")
            raise await reason(frames, fault) from error
        return ReceivedChunk(opening.first_page, opening.num_pages, kv)

    def close(self) -> None:
        """Every pull on its way is broken off. The event loop has no room left that uses this."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.end()
            link.break_off()
        deadline_s = time.monotonic() + _CLOSE_S
        stuck = sum(not link.wait_over(max(0.0, deadline_s - time.monotonic())) for link in links)
        if stuck:
            log.warning("%d pulls from stopped processes are left behind", stuck)

    async def _pull(self, offer: ChunkOffer, frames: RoomFrames) -> jax.Array:
        """The verified array. Raises what the library raises, and RoomFault."""
        link = self._link(frames.source, offer.address)
        verify = functools.partial(self._verify, offer, frames.receiver.counters)
        frames.receiver.awaits_sender()
        try:
            return await asyncio.wrap_future(link.pull(offer.uuid, self._programs.spec(offer.num_rows), verify))
        finally:
            frames.receiver.heard_sender()

    def _verify(self, offer: ChunkOffer, counters: Counters, kv: jax.Array) -> jax.Array:
        """In the link's thread. An array that failed raises when it is waited for, and only then."""
        kv.block_until_ready()
        started_s = time.monotonic()
        checksum = self._programs.checksum(kv)
        counters.copied(time.monotonic() - started_s)
        if checksum != offer.checksum:
            raise RoomFault(
                FailureKind.DAMAGED,
                f"pages {offer.first_page} to {offer.first_page + offer.num_pages - 1} arrived damaged: "
                f"checksum {checksum:#018x}, sent {offer.checksum:#018x}",
            )
        return kv

    def _link(self, source: Peer, address: str) -> PullLink:
        link = self._links.pop(source, None)
        if link is not None and link.address != address:  # the other side has replaced its own
            link.end()
            link = None
        if link is None:
            try:
                link = PullLink(*self._endpoint, address)
            except ValueError as error:
                raise RoomFault(FailureKind.PROTOCOL, str(error)) from error
        self._links[source] = link
        while len(self._links) > MAX_LINKS:
            self._links.pop(next(iter(self._links))).end()
        if link.waited_s() > self._stall_timeout_s:
            raise RoomFault(FailureKind.STALLED, f"a chunk that was asked for {link.waited_s():.1f} s ago is still on its way")
        return link
