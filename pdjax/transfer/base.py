"""KV movement between a prefill and a decode worker, behind one small interface.

A `KVSource` belongs to a prefill worker and makes one `KVSender` a room; a `KVSink` belongs to a decode worker and makes one
`KVReceiver` a room. The engine loop of each worker is the only caller of all methods here unless a method says otherwise; no method
blocks. A transport's own threads move the bytes and call `wake` (given at construction, thread-safe, cheap) whenever a state or a
queue that the loop looks at has changed.

Chunks travel in prompt order. A chunk is an array `[n, layers, page_size, 2 * kv_heads, head_dim]` (page-major, so that the first
k pages are contiguous) of which the first `num_pages` rows count; rows behind them are padding and need not be moved.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pdjax.protocol import KVPoll, Layout, Peer
from pdjax.transfer.rooms import Counters

if TYPE_CHECKING:  # the rules of a room need no device: the simulation runs them without jax
    import jax

Wake = Callable[[], None]


class ReceivedChunk(NamedTuple):
    """Pages `first_page .. first_page + num_pages` of a prompt, complete and verified. `kv` may hold padding rows behind them."""

    first_page: int
    num_pages: int
    kv: jax.Array  # [n >= num_pages, layers, page_size, 2 * kv_heads, head_dim]


class KVSender(abc.ABC):
    """Prefill's end of one room. Born BOOTSTRAPPING; WAITING_FOR_INPUT once decode has announced itself."""

    room: int

    @abc.abstractmethod
    def poll(self) -> KVPoll:
        """The room's state; deadlines are applied here."""

    @property
    @abc.abstractmethod
    def decode_prefix_tokens(self) -> int:
        """How much of the prompt decode already holds. Only from WAITING_FOR_INPUT on."""

    @abc.abstractmethod
    def can_send(self) -> bool:
        """Whether another chunk fits into the bound on chunks in flight. False before bootstrap and after failure."""

    @abc.abstractmethod
    def send(self, first_page: int, num_pages: int, kv: jax.Array) -> None:
        """Hand over one chunk. The sender owns `kv` until it has left; the caller must not donate it. Requires `can_send()`."""

    @abc.abstractmethod
    def finish(self, metadata: bytes) -> None:
        """Everything has been handed over; `metadata` rides with the last message. SUCCESS follows once it has left and was accepted."""

    @abc.abstractmethod
    def fail(self, message: str) -> None:
        """End the room from this side: FAILED here at once, and the receiver hears of it. Idempotent; no effect after SUCCESS."""

    @abc.abstractmethod
    def failure(self) -> str | None:
        """Why the room is FAILED; None while it is not."""


class KVSource(abc.ABC):
    """Makes senders. An announcement that comes before its sender waits for it, in a bounded place and for a bounded time.

    `counters` may be read from any thread.
    """

    counters: Counters

    @abc.abstractmethod
    def create_sender(self, room: int) -> KVSender:
        """Raises ValueError where the room is taken already."""

    @abc.abstractmethod
    def take_changed(self) -> list[int]:
        """Rooms whose sender's state has moved since the last call, but for what only a `poll` finds: a deadline that has passed."""

    @abc.abstractmethod
    def open_rooms(self) -> int:
        """Rooms that still hold anything: senders not yet in a final state, announcements without a sender, chunks not yet let go."""

    @abc.abstractmethod
    def close(self) -> None:
        """Fail what is open and stop every thread of the transport."""


class KVReceiver(abc.ABC):
    """Decode's end of one room. Announces on construction; TRANSFERRING once prefill has accepted."""

    room: int

    @abc.abstractmethod
    def poll(self) -> KVPoll:
        """The room's state; deadlines are applied here. SUCCESS only after the last chunk was verified and can be taken."""

    @abc.abstractmethod
    def take(self) -> list[ReceivedChunk]:
        """Chunks that arrived since the last call, in order. At most a bounded number waits here; the link is held back beyond that."""

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """The metadata row. Only after SUCCESS."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop the room: nothing more will come out of `take`, and the sender hears of it. Idempotent."""

    @abc.abstractmethod
    def failure(self) -> str | None:
        """Why the room is FAILED; None while it is not."""

    @abc.abstractmethod
    def is_refused(self) -> bool:
        """Whether prefill refused the room for a reason that another try cannot change (layout mismatch)."""


class KVSink(abc.ABC):
    """Makes receivers. `counters` may be read from any thread."""

    counters: Counters

    @abc.abstractmethod
    def open(self, room: int, source: Peer, decode_prefix_tokens: int) -> KVReceiver:
        """Announce the room to `source` and start receiving what lies past `decode_prefix_tokens`."""

    @abc.abstractmethod
    def open_rooms(self) -> int:
        """Rooms that still hold anything."""

    @abc.abstractmethod
    def close(self) -> None:
        """Abort what is open and stop every thread of the transport."""


class Emulation(NamedTuple):
    """A slower link than there is, for measurements. The defaults are the link as it is, at no cost.

    `bytes_per_s`: what leaves one prefill worker, over all rooms. `announce_delay_s`: between a receiver's creation and its announcement.
    """

    bytes_per_s: float | None = None
    announce_delay_s: float = 0.0


class TransferLimits(NamedTuple):
    """Bounds of one transport.

    `bootstrap_timeout_s`: how long an announcement waits for its sender, and a receiver for its answer.
    `stall_timeout_s`: how long an accepted room may make no progress while the other side owes it something.
    `hold_timeout_s`: how long a receiver may hold the link back because its engine takes no chunks.
    `announce_timeout_s`: how long a sender waits for its announcement. Decode announces when it has room, and how long that takes is no
    matter of the link: callers end the wait at the request's deadline (`fail`), and this limit stands behind them.
    """

    max_chunks_in_flight: int = 2
    bootstrap_timeout_s: float = 30.0
    stall_timeout_s: float = 10.0
    max_unclaimed_announcements: int = 1024
    hold_timeout_s: float = 30.0
    announce_timeout_s: float = math.inf
    emulation: Emulation = Emulation()


__all__ = ["Emulation", "KVReceiver", "KVSender", "KVSink", "KVSource", "Layout", "ReceivedChunk", "TransferLimits", "Wake"]
