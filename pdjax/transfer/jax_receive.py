"""Decode's half of `jax_transfer`: chunks are pulled from the prefill worker's device to this one and verified here."""

from __future__ import annotations

import asyncio
import functools
import logging
import time

import grpc.aio
import jax

from pdjax.protocol import ChunkHead, ChunkOffer, Peer, SendFailed
from pdjax.transfer.base import ReceivedChunk
from pdjax.transfer.checksum import ChecksumPrograms
from pdjax.transfer.grpc_receive import Lander, RoomFrames, unexpected
from pdjax.transfer.jax_links import PullLink, start_server
from pdjax.transfer.jax_send import TRANSPORT, Endpoint
from pdjax.transfer.rooms import Counters, FailureKind, RoomFault

log = logging.getLogger(__name__)

MAX_LINKS = 32
"""Prefill workers come and go; of the links beyond this many the one that was used longest ago is given up."""
_REASON_S = 1.0  # for the sender's word on why a pull failed
_CLOSE_S = 2.0


class PullLander(Lander):
    """Pulls what `ChunkOffer` offers. Used in the sink's event loop, but for `close`.

    A pull whose room has ended goes on by itself, and its array is dropped. One that takes `stall_timeout_s` is given up together with its
    link: whatever else waits there waits for the same peer. The next room gets a new link.
    """

    transport = TRANSPORT

    def __init__(self, programs: ChecksumPrograms, max_rows: int, endpoint: Endpoint, stall_timeout_s: float) -> None:
        """`max_rows`: the largest chunk that the engine takes. Raises ValueError where transfer servers do not work here."""
        start_server(endpoint.host, endpoint.device)  # better now than in the first request
        self._programs = programs
        self._max_rows = max_rows
        self._endpoint = endpoint
        self._stall_timeout_s = stall_timeout_s
        self._links: dict[tuple[Peer, str], PullLink] = {}

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
            raise await _reason(frames, fault) from error
        return ReceivedChunk(opening.first_page, opening.num_pages, kv)

    def close(self) -> None:
        """Every pull that waits is given up. The event loop has no room left that uses this."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.give_up()
        deadline_s = time.monotonic() + _CLOSE_S
        stuck = sum(not link.wait_over(max(0.0, deadline_s - time.monotonic())) for link in links)
        if stuck:
            log.warning("%d pulls from stopped processes are left behind", stuck)

    async def _pull(self, offer: ChunkOffer, frames: RoomFrames) -> jax.Array:
        """The verified array. Raises what the library raises, and RoomFault."""
        key = (frames.source, offer.address)
        link = self._link(key)
        verify = functools.partial(self._verify, offer, frames.receiver.counters)
        frames.receiver.awaits_sender()
        pulled = link.pull(offer.uuid, self._programs.spec(offer.num_rows), verify)
        watch = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._give_up_unless, pulled.done, key, link)
        try:
            return await asyncio.wrap_future(pulled)
        finally:
            frames.receiver.heard_sender()
            if pulled.done():
                watch.cancel()

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

    def _link(self, key: tuple[Peer, str]) -> PullLink:
        link = self._links.pop(key, None)
        if link is None:
            try:
                link = PullLink(*self._endpoint, key[1])
            except ValueError as error:
                raise RoomFault(FailureKind.PROTOCOL, str(error)) from error
        self._links[key] = link
        while len(self._links) > MAX_LINKS:
            self._links.pop(next(iter(self._links))).give_up()
        return link

    def _give_up_unless(self, is_done: functools.partial[bool], key: tuple[Peer, str], link: PullLink) -> None:
        if not is_done():
            log.warning("prefill worker %s: a chunk did not come within %s s, the link is given up", key[0].address, self._stall_timeout_s)
            link.give_up()
            if self._links.get(key) is link:
                del self._links[key]


async def _reason(frames: RoomFrames, fault: RoomFault) -> Exception:
    """What ended the room. Where a pull fails, the sender knows why: it says so in the stream, or its connection breaks."""
    try:
        async with asyncio.timeout(_REASON_S):
            while not isinstance(frame := await frames.next(), SendFailed):
                pass
    except TimeoutError:
        return fault
    except (RoomFault, grpc.aio.AioRpcError) as reason:
        return reason
    return unexpected(frame, "after a chunk that could not be pulled")
