"""One gRPC channel for each worker that KV is fetched from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from pdjax import rpc
from pdjax.protocol import Peer

MAX_CHANNELS = 64
"""Workers come and go; channels that nobody uses are closed beyond this many."""


@dataclasses.dataclass
class _Entry:
    """A channel and the number of rooms that use it. Retired: no longer in the cache, closed by its last user."""

    instance_id: str
    channel: grpc.aio.Channel
    num_users: int = 0
    is_retired: bool = False


class ChannelCache:
    """Used in one event loop only.

    A channel is replaced when the worker at its address is another one (`instance_id`) or its connection has failed. Rooms that still use
    the old channel end on it by themselves: their worker is gone.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._surplus: list[_Entry] = []  # retired and without users, to be closed at the next opportunity

    @contextlib.asynccontextmanager
    async def lease(self, peer: Peer) -> AsyncIterator[grpc.aio.Channel]:
        entry = self._entry(peer)
        entry.num_users += 1
        try:
            await self._close_surplus()
            yield entry.channel
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._retire(peer.address, entry)
            raise
        finally:
            entry.num_users -= 1
            if entry.is_retired and not entry.num_users:
                self._surplus.append(entry)
            await self._close_surplus()

    async def close(self) -> None:
        """Close every channel; whatever uses one fails."""
        self._surplus += self._entries.values()
        self._entries.clear()
        await self._close_surplus()

    def _entry(self, peer: Peer) -> _Entry:
        entry = self._entries.get(peer.address)
        if entry is not None and entry.instance_id == peer.instance_id:
            return entry
        if entry is not None:
            self._retire(peer.address, entry)
        entry = _Entry(peer.instance_id, grpc.aio.insecure_channel(peer.address, options=rpc.CHANNEL_OPTIONS))
        self._entries[peer.address] = entry
        return entry

    def _retire(self, address: str, entry: _Entry) -> None:
        entry.is_retired = True
        if self._entries.get(address) is entry:
            del self._entries[address]
        if not entry.num_users:
            self._surplus.append(entry)

    async def _close_surplus(self) -> None:
        unused = [(address, entry) for address, entry in self._entries.items() if not entry.num_users]
        for address, entry in unused[: max(0, len(self._entries) - MAX_CHANNELS)]:
            self._retire(address, entry)
        while self._surplus:
            await self._surplus.pop().channel.close()
