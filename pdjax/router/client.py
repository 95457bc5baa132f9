"""A router's handle on one worker."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator

from pdjax.protocol import Event, SequenceRequest, WorkerInfo


class WorkerClient(abc.ABC):
    """Both calls give `Tokens` events, then exactly one `Finished` or `Failed`. A lost connection is a retriable `Failed`, never an
    exception. Closing the iterator (`aclose`) makes the worker abort the sequence within one step.
    """

    info: WorkerInfo

    @abc.abstractmethod
    def prefill(self, request: SequenceRequest) -> AsyncIterator[Event]:
        """Compute the prompt, give the first token, send the KV to whoever announces `request.room`; ends with `handed_off`,
        or with `stop` or `length` where the first token ends the answer."""

    @abc.abstractmethod
    def decode(self, request: SequenceRequest) -> AsyncIterator[Event]:
        """Fetch the KV from `request.prefill` (None: compute the prompt here) and generate to the end. After a transfer the first
        token given has index `request.num_prior + 1`, after local computation `request.num_prior`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of the connection."""
