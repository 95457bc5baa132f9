"""The router: takes sequences, has a pair of workers compute each, and keeps every answer whole when workers fail.

For one event loop. Workers see token ids only; text is the business of `pdjax.api`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from pdjax.api.backend import Backend, ModelCard, Part, ScoredPrompt
from pdjax.config.schema import RouterConfig
from pdjax.errors import BadRequest, DeadlineExceeded, NoWorker, OverCapacity, WorkerFailed
from pdjax.observe.router_metrics import RouterStats
from pdjax.observe.timelines import RequestTimelines
from pdjax.protocol import Event, Failed, Finished, Sampling, TokenOut, Tokens
from pdjax.router.attempt import Attempt
from pdjax.router.fleet import Fleet, Health, Role
from pdjax.router.merge import Broken, Ended, Merge, Side
from pdjax.router.policy import Pair, PairPolicy
from pdjax.router.roster import Roster
from pdjax.router.sequence import Sequence

ROOM_BITS = 63

SETTLE_S = 0.25
"""How long a sequence that is over on decode waits for prefill's last word."""

RETRY_AFTER_S = 1.0
"""What a client is told that comes over capacity; about the time of a short answer."""

OUTCOMES: dict[type[BaseException], str] = {
    BadRequest: "bad_request",
    OverCapacity: "over_capacity",
    NoWorker: "no_worker",
    DeadlineExceeded: "deadline",
    WorkerFailed: "worker_failed",
    GeneratorExit: "cancelled",
    asyncio.CancelledError: "cancelled",
}


class ModelIdentity(NamedTuple):
    """What the checkpoint says about the served model; the limits come from the workers."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Backoff(NamedTuple):
    """Pauses before an attempt: `base_s`, doubled each time up to `max_s`, times a random factor between 0.5 and 1.5."""

    base_s: float = 0.02
    max_s: float = 0.5

    def pause_s(self, num_before: int, rng: random.Random) -> float:
        """The pause after `num_before + 1` failures in a row."""
        return min(self.base_s * 2 ** min(num_before, 16), self.max_s) * rng.uniform(0.5, 1.5)


class Router(Backend):
    """Owns the sequences in flight and the `timelines` of the last ones; membership and connections belong to `roster`.

    `rng` draws rooms and jitter. The default cannot be guessed; a seeded one makes a run repeatable.
    """

    def __init__(
        self,
        config: RouterConfig,
        model: ModelIdentity,
        roster: Roster,
        stats: RouterStats,
        rng: random.Random | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008, a frozen value
    ):
        self._config = config
        self._model = model
        self._roster = roster
        self._stats = stats
        self._rng = rng or random.SystemRandom()
        self._backoff = backoff
        self._policy = PairPolicy(roster.fleet)
        self._in_flight = 0
        self.timelines = RequestTimelines()
        self._is_closing = False
        watch_fleet(stats, roster.fleet)

    @property
    def num_in_flight(self) -> int:
        """Sequences taken and not yet ended."""
        return self._in_flight

    def model_card(self) -> ModelCard:
        """The model with the smallest limits of any worker. Raises NoWorker before the first worker has joined."""
        limits = self._roster.fleet.limits()
        if limits is None:
            raise NoWorker("no worker has joined yet")
        return ModelCard(
            name=self._model.name,
            vocab_size=self._model.vocab_size,
            max_context_tokens=limits.max_context_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
            eos_token_ids=self._model.eos_token_ids,
        )

    def is_ready(self) -> bool:
        """Whether a decode worker is well and the next sequence would be taken."""
        return not self._is_closing and self._in_flight < self._config.max_in_flight and self._roster.fleet.is_ready()

    def close(self) -> None:
        """Take no more, and try nothing again: what breaks from now on ends with NoWorker at once."""
        self._is_closing = True

    def _check_open(self) -> None:
        if self._is_closing:
            raise NoWorker("the server is shutting down")

    async def generate(self, request_id: str, prompt: list[int], sampling: Sampling, deadline_s: float) -> AsyncGenerator[Part, None]:
        """See `Backend.generate`. BadRequest is raised too, where a worker finds the request impossible."""
        self._admit()
        finished: Finished | None = None
        outcome = "internal"
        record = self.timelines.begin(request_id)
        try:
            sequence = Sequence(record, prompt, sampling, deadline_s, self._config.max_attempts)
            async with aclosing(self._answer(sequence)) as parts:
                async for part in parts:
                    if isinstance(part, Finished):
                        finished = part
                    else:
                        yield part
            outcome = "ok"
        except BaseException as error:
            outcome = OUTCOMES.get(type(error), "internal")
            raise
        finally:
            self._in_flight -= 1
            self._stats.request_ended(outcome, self._in_flight)
            record.end(outcome)
        # Everything has been let go by now: a caller that drops the generator here leaves nothing behind.
        assert finished is not None, f"the answer to {request_id} has no end"
        yield finished

    def _admit(self) -> None:
        self._check_open()
        if self._in_flight >= self._config.max_in_flight:
            self._stats.request_ended("over_capacity", self._in_flight)
            raise OverCapacity(f"{self._in_flight} sequences are in flight, the limit is {self._config.max_in_flight}", RETRY_AFTER_S)
        self._in_flight += 1
        self._stats.request_began(self._in_flight)

    async def _answer(self, sequence: Sequence) -> AsyncGenerator[Part, None]:
        """Attempt after attempt until the answer is whole. A loop turn is one attempt."""
        until_s = self._roster.fleet.clock() + sequence.deadline_s - time.time()
        while (whole := sequence.complete()) is None:
            pair = await self._choose(sequence, until_s)
            if sequence.last_kind is not None:
                self._stats.retried(sequence.last_kind)
            requests = sequence.requests(pair, self._rng.getrandbits(ROOM_BITS))
            merge = Merge(len(sequence.tokens), sequence.sampling.max_tokens, pair.prefill is not None, sequence.prompt_due)
            sequence.record.dispatched(requests.decode.room, _addresses(pair), merge.last_words)
            async with Attempt(self._roster, pair, requests) as attempt:
                while merge.outcome is None:
                    tokens = await self._advance(attempt, merge, until_s)
                    if scored := merge.take_prompt():
                        sequence.gave_prompt(scored)
                        yield ScoredPrompt(scored)
                    for token in tokens:
                        sequence.gave(token.token)
                        yield token
            sequence.note_cached_tokens(merge.cached_tokens)
            if isinstance(merge.outcome, Ended):
                whole = sequence.finished(merge.outcome.finished)
                break
            await self._prepare_retry(sequence, pair, merge.outcome, until_s)
        yield whole

    async def _choose(self, sequence: Sequence, until_s: float) -> Pair:
        """The pair for the next attempt. A sequence that is under way waits for one: for room until its deadline, for a worker about
        as long as it takes to find one gone."""
        choose = self._policy.choose_decode if sequence.is_last_attempt else self._policy.choose_pair
        clock = self._roster.fleet.clock
        give_up_s = clock() + self._config.heartbeat_timeout_s
        while True:
            try:
                return choose(sequence.current_prompt(), sequence.tried)
            except OverCapacity as error:
                if not sequence.tokens:
                    raise OverCapacity(str(error), RETRY_AFTER_S) from None
                sequence.tried.full.clear()
                await self._pause(sequence, self._backoff.pause_s(sequence.num_full - 1, self._rng), until_s)
            except NoWorker as error:
                self._check_open()
                if not sequence.last_failure:
                    raise
                if clock() >= give_up_s:
                    raise WorkerFailed(f"{sequence.last_failure}; {error}") from None
                await self._roster.wait_changed(min(give_up_s, until_s) - clock())
                self._check_deadline(sequence, until_s)

    async def _advance(self, attempt: Attempt, merge: Merge, until_s: float) -> list[TokenOut]:
        """Take the next event; returns the tokens that follow from it. Raises DeadlineExceeded.

        A sequence that settles waits a moment only; then decode's word stands for prefill's.
        """
        limit_s = min(until_s, self._roster.fleet.clock() + SETTLE_S) if merge.is_settling else until_s
        try:
            side, event = await attempt.next_event(limit_s)
        except TimeoutError:
            if not merge.is_settling:
                raise DeadlineExceeded("the request's deadline passed before its last token") from None
            merge.conclude()
            return []
        self._note(attempt, side, event)
        return merge.feed(side, event)

    def _note(self, attempt: Attempt, side: Side, event: Event) -> None:
        """What an event says about its worker."""
        pair = attempt.pair
        if isinstance(event, Failed) and event.kind == "internal":
            self._roster.fleet.suspect(pair.worker(side))
        elif isinstance(event, Tokens) and event.tokens and side is Side.PREFILL and pair.prefill is not None:
            self._policy.computed(pair.prefill, attempt.requests.decode.prompt)

    async def _prepare_retry(self, sequence: Sequence, pair: Pair, outcome: Broken | None, until_s: float) -> None:
        """Count the failed attempt and pause; raises where no other attempt can help. A full worker's neighbour is asked at once."""
        assert outcome is not None, sequence.request_id
        self._stats.attempt_failed(outcome.failed.kind, pair.worker(outcome.side).info.peer.address)
        if sequence.complete() is not None:
            return
        self._check_open()
        sequence.note_failure(pair, outcome)
        if outcome.failed.kind != "over_capacity":
            await self._pause(sequence, self._backoff.pause_s(sequence.num_failed - 1, self._rng), until_s)

    async def _pause(self, sequence: Sequence, pause_s: float, until_s: float) -> None:
        await asyncio.sleep(min(pause_s, max(until_s - self._roster.fleet.clock(), 0)))
        self._check_deadline(sequence, until_s)

    def _check_deadline(self, sequence: Sequence, until_s: float) -> None:
        if self._roster.fleet.clock() >= until_s:
            raise DeadlineExceeded(f"request {sequence.request_id}: the deadline passed after {sequence.last_failure}")


def _addresses(pair: Pair) -> dict[str, str]:
    """By side, prefill first."""
    members = {} if pair.prefill is None else {Side.PREFILL: pair.prefill}
    return {side.value: member.info.peer.address for side, member in {**members, Side.DECODE: pair.decode}.items()}


def watch_fleet(stats: RouterStats, fleet: Fleet) -> None:
    """Have every scrape of `stats` count the workers of `fleet` by role and health."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        for health in Health:
            stats.watch_workers(role, health.value, lambda role=role, health=health: fleet.count(role, health))
