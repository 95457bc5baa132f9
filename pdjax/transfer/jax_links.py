"""`jax.experimental.transfer`, fenced in: what the project knows of the library is here and nowhere else.

An array is offered under a number and given out to the one who pulls that number. Measured with jax 0.10.2 between processes on CPU:

* Nothing ends by itself. A pull of a number that nobody offers waits for ever, and `timeout` arguments did not fire within 12-22 s. An
  offer that nobody pulls stays. So both sides keep deadlines of their own, and offers are withdrawn.
* A second offer under the same number silently takes the place of the first. Numbers therefore come from a counter; and an offer is
  withdrawn by one without arrays: the memory is free at once, and a pull that comes late gets an error instead of waiting.
* An array that failed is ready like any other; only waiting for it raises. What arrives is not checked by anything but TCP.
* A server receives in one thread, which waits for the peer that it reads from: a peer that stops in mid-transfer keeps all others waiting.
  So each side has one server a peer. A server takes 0.4 ms to start and is taken apart when nothing refers to it any more.
* A pull cannot be taken back. Breaking its connection off from this side (`_poison_connection`, which has no public name) left servers on
  either side unable to move anything more, and arrays held for ever, where the other process had been stopped. A pull that was left alone
  ended well once that process went on, and with an error once it died. So an overdue pull is left alone, keeping its thread and its
  memory, its link takes no other meanwhile, and connections are broken off only when the worker itself ends.
* Both ends must cut transfers into pieces of the same size.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import transfer

PIECE_BYTES = 1 << 20
"""What is copied and sent at a time; larger pieces were no faster."""

_PARALLEL_PIECES = 8


def start_server(host: str, device: jax.Device) -> transfer.TransferServer:
    """A server at a free port of the IP address `host`. Raises ValueError where the platform has none or the address cannot be had."""
    place = f"[{host}]:0" if ":" in host else f"{host}:0"
    try:
        return transfer.start_transfer_server(
            device.client, place, [place], max_num_parallel_copies=_PARALLEL_PIECES, transfer_size=PIECE_BYTES
        )
    except Exception as error:  # the library raises what the platform's client raises
        raise ValueError(f"jax.experimental.transfer does not start at {host} on {device.platform}: {error}") from error


class OfferLink:
    """Offers arrays to one peer. Used in one event loop only; no method blocks."""

    def __init__(self, host: str, device: jax.Device) -> None:
        self._server = start_server(host, device)
        self.address: str = self._server.address()
        self.num_withdrawn = 0

    def offer(self, uuid: int, kv: jax.Array) -> None:
        """Hold `kv`, which has been computed, until it is pulled or withdrawn. `uuid` is used once."""
        self._server.await_pull(uuid, [kv])

    def withdraw(self, uuid: int) -> None:
        """Let go of what was offered; a pull that has begun gets it still. Leaves a note of some hundred bytes in the server."""
        self._server.await_pull(uuid, [])
        self.num_withdrawn += 1


class _Pull(NamedTuple):
    array: jax.Array
    finish: Callable[[jax.Array], Any]
    result: concurrent.futures.Future[Any]


class PullLink:
    """Pulls arrays from one peer's `OfferLink`. A thread of its own waits for them, in the order in which they were asked for.

    Used in one event loop, but for `close` and `wait_over`.
    """

    def __init__(self, host: str, device: jax.Device, address: str) -> None:
        """Raises ValueError where `address` is none."""
        self.address = address
        self._server = start_server(host, device)
        try:
            self._connection = self._server.connect(address)
        except Exception as error:
            raise ValueError(f"{address!r} is no address of a transfer server: {error}") from error
        # Bounded by the rooms of this worker: each pulls one chunk at a time.
        self._pulls: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        self._waiting_since_s: float | None = None
        self._is_ended = False
        # A daemon: a pull from a stopped process may outlast every deadline, and must not keep this process from ending.
        self._thread = threading.Thread(target=self._run, name=f"kv-pull-{address}", daemon=True)
        self._thread.start()

    def pull(self, uuid: int, spec: jax.ShapeDtypeStruct, finish: Callable[[jax.Array], Any]) -> concurrent.futures.Future[Any]:
        """Ask for the array `uuid` of the form `spec`, and run `finish` on it in this link's thread.

        `finish` waits for the array and finds out whether it is good; its result, or what it raises, is the future's. A future that is
        cancelled in time saves `finish`, not the transfer.
        """
        assert not self._is_ended, f"pull on a link to {self.address} that has ended"
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._pulls.put(_Pull(self._connection.pull(uuid, spec), finish, result))
        return result

    def waited_s(self) -> float:
        """How long the oldest pull has been waited for; 0 where nothing is on its way."""
        since_s = self._waiting_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def end(self) -> None:
        """Nothing is pulled any more: the thread ends, and the connection is closed, behind the last pull on its way. Idempotent."""
        if not self._is_ended:
            self._is_ended = True
            self._pulls.put(None)

    def break_off(self) -> None:
        """The worker ends: fail every pull on its way, as far as the library can. After `end`."""
        assert self._is_ended, f"the link to {self.address} is broken off before its end"
        self._connection._poison_connection()

    def wait_over(self, timeout_s: float) -> bool:
        """Whether the thread ends within `timeout_s`. After `end`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (pull := self._pulls.get()) is not None:
            self._waiting_since_s = time.monotonic()
            self._settle(pull)
            self._waiting_since_s = None
            del pull  # or the array would stay until the next one comes

    def _settle(self, pull: _Pull) -> None:
        if not pull.result.set_running_or_notify_cancel():
            with contextlib.suppress(Exception):  # nobody asks any more how it ended
                pull.array.block_until_ready()
            return
        try:
            pull.result.set_result(pull.finish(pull.array))
        except Exception as error:  # the future's reader decides what it means
            pull.result.set_exception(error)
