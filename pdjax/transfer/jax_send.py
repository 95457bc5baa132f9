"""Prefill's half of `jax_transfer`: chunks stay on the device and are offered to the decode worker, which pulls them.

What is offered is bounded: a room has at most `max_chunks_in_flight` chunks, all rooms together `max_offered_bytes`. An offer ends by
the receiver's `ChunkPulled` or with its room, which withdraws it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
from collections.abc import Callable
from typing import NamedTuple

import grpc
import grpc.aio
import jax

from pdjax import rpc
from pdjax.protocol import Announce, ChunkOffer, ChunkPulled, Peer, PulledReply
from pdjax.transfer.base import Emulation
from pdjax.transfer.budget import ByteBudget, Reservation
from pdjax.transfer.checksum import ChecksumPrograms
from pdjax.transfer.emulation import Link, make_link
from pdjax.transfer.grpc_send import Carrier, Carriers, Preparation, Preparer, RoomWriter
from pdjax.transfer.jax_links import OfferLink, start_server
from pdjax.transfer.sender import OutboundChunk, RoomSender

TRANSPORT = "jax_transfer"
MAX_LINKS = 32
"""Decode workers come and go; of the links beyond this many the one that was used longest ago is let go, with its last offer."""
MAX_WITHDRAWN = 4096
"""A link with this many notes of withdrawn offers is replaced, which frees them: about 1 MB."""


class Endpoint(NamedTuple):
    """Where a worker's transfer servers listen, and the device whose arrays they move."""

    host: str
    device: jax.Device


class Offer(NamedTuple):
    """A chunk that is held for its receiver. `pulled` is called once if the receiver has it."""

    room: int
    uuid: int
    link: OfferLink
    reservation: Reservation
    pulled: Callable[[int], None]


class OfferBook:
    """Every offer of a worker. Used in the server's event loop only."""

    def __init__(self, endpoint: Endpoint, max_offered_bytes: int) -> None:
        """Raises ValueError where transfer servers do not work here."""
        start_server(endpoint.host, endpoint.device)  # better now than in the first request
        self.budget = ByteBudget(max_offered_bytes)
        self._endpoint = endpoint
        self._links: collections.OrderedDict[Peer, OfferLink] = collections.OrderedDict()
        self._offers: dict[int, Offer] = {}
        self._next_uuid = secrets.randbits(62)  # not from 0: a number means nothing to the worker that follows at an address

    def offer(self, room: int, receiver: Peer, kv: jax.Array, reservation: Reservation, pulled: Callable[[int], None]) -> Offer:
        """`kv` has been computed and its bytes were granted."""
        assert reservation.is_held, f"room {room}: offer without its bytes"
        link = self._link(receiver)
        uuid, self._next_uuid = self._next_uuid, self._next_uuid + 1
        link.offer(uuid, kv)
        offer = self._offers[uuid] = Offer(room, uuid, link, reservation, pulled)
        return offer

    def note_pulled(self, room: int, uuid: int) -> None:
        """The receiver has it. Without effect where nothing is offered to that room under that number."""
        offer = self._offers.get(uuid)
        if offer is not None and offer.room == room:
            del self._offers[uuid]
            self.budget.release(offer.reservation)
            offer.pulled(uuid)

    def withdraw(self, offer: Offer) -> None:
        """The room has ended: let go of the array."""
        del self._offers[offer.uuid]
        offer.link.withdraw(offer.uuid)
        self.budget.release(offer.reservation)

    def _link(self, receiver: Peer) -> OfferLink:
        link = self._links.pop(receiver, None)
        if link is None or link.num_withdrawn >= MAX_WITHDRAWN:
            link = OfferLink(*self._endpoint)  # offers of the one before keep it alive until they end
        self._links[receiver] = link
        while len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        return link


class OfferCarriers(Carriers):
    """Sends chunks as `ChunkOffer`."""

    transport = TRANSPORT

    def __init__(self, programs: ChecksumPrograms, endpoint: Endpoint, max_offered_bytes: int, emulation: Emulation = Emulation()) -> None:
        """Raises ValueError where transfer servers do not work here."""
        self._book = OfferBook(endpoint, max_offered_bytes)
        self._link = make_link(emulation)
        self._preparer = Preparer(lambda chunk: programs.checksum(chunk.kv))

    def open(self, announce: Announce, writer: RoomWriter) -> Carrier:
        return _OfferCarrier(self._book, self._preparer, self._link, announce.receiver, writer)

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        method = grpc.unary_unary_rpc_method_handler(
            self._note_pulled, request_deserializer=rpc.decoder(ChunkPulled), response_serializer=rpc.encode
        )
        return {rpc.PULLED_KV.rpartition("/")[2]: method}

    def close(self) -> None:
        self._link.close()
        self._preparer.close()

    async def _note_pulled(self, pulled: ChunkPulled, context: grpc.aio.ServicerContext) -> PulledReply:
        self._book.note_pulled(pulled.room, pulled.uuid)
        return PulledReply()


class _Held(NamedTuple):
    offer: Offer
    preparation: Preparation[int]
    moved_bytes: int


class _OfferCarrier(Carrier):
    """One room's offers. The sender's clock runs while any is open: the receiver takes it, or holds back within its limit."""

    def __init__(self, book: OfferBook, preparer: Preparer[int], link: Link, receiver: Peer, writer: RoomWriter) -> None:
        self._book = book
        self._preparer = preparer
        self._link = link
        self._receiver = receiver
        self._writer = writer
        self._held: dict[int, _Held] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def carry(self, sender: RoomSender, chunk: OutboundChunk) -> None:
        with contextlib.ExitStack() as undo:
            preparation = self._preparer.start(sender, chunk)
            undo.callback(preparation.end, 0)
            checksum = await self._writer.alive_until(asyncio.wrap_future(preparation.result))
            if checksum is None:
                return
            reservation = self._book.budget.request(chunk.kv.nbytes)
            undo.callback(self._book.budget.release, reservation)
            if not await self._writer.alive_until(reservation.granted):
                return
            await self._writer.alive_until(asyncio.ensure_future(self._link.carry(chunk.kv.nbytes)))
            if sender.is_failed():
                return
            offer = self._hold(chunk, preparation, reservation)
            undo.pop_all()
        frame = ChunkOffer(chunk.first_page, chunk.num_pages, chunk.kv.shape[0], offer.link.address, offer.uuid, checksum)
        await self._writer.frame(sender, frame)
        self._set_clock(sender)

    async def settle(self, sender: RoomSender) -> None:
        self._set_clock(sender)  # the last frame has stopped it
        await self._writer.silent_until(asyncio.ensure_future(self._is_empty.wait()))

    def close(self) -> None:
        for held in list(self._held.values()):
            self._book.withdraw(held.offer)
            held.preparation.sender.counters.withdrawn(held.offer.reservation.num_bytes)
            held.preparation.end(0)
        self._held.clear()

    def _hold(self, chunk: OutboundChunk, preparation: Preparation[int], reservation: Reservation) -> Offer:
        """From here on the chunk ends by `_pulled` or `close`."""
        sender = preparation.sender
        offer = self._book.offer(sender.room, self._receiver, chunk.kv, reservation, self._pulled)
        sender.counters.offered(reservation.num_bytes)
        self._held[offer.uuid] = _Held(offer, preparation, chunk.num_pages * (chunk.kv.nbytes // chunk.kv.shape[0]))
        self._is_empty.clear()
        return offer

    def _pulled(self, uuid: int) -> None:
        held = self._held.pop(uuid)
        sender = held.preparation.sender
        sender.counters.fetched(held.offer.reservation.num_bytes)
        sender.counters.sent(held.moved_bytes)
        held.preparation.end(held.moved_bytes)
        self._set_clock(sender)
        if not self._held:
            self._is_empty.set()

    def _set_clock(self, sender: RoomSender) -> None:
        if self._held:
            sender.link_owes(self._writer.hold_limit_s)
        else:
            sender.link_paid()
