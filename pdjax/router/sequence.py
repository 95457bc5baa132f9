"""One sequence over all its attempts: what the client has, what failed, and whether another attempt can help. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdjax.errors import BadRequest, DeadlineExceeded, WorkerFailed
from pdjax.observe.timelines import SequenceRecord
from pdjax.protocol import Failed, Finished, PromptToken, Sampling, SequenceRequest
from pdjax.router.merge import Broken
from pdjax.router.policy import Pair, Tried
from pdjax.scheduler.sequence import answer_end


class PairRequests(NamedTuple):
    """What each worker of a pair is asked; `prefill` None where decode computes the prompt."""

    prefill: SequenceRequest | None
    decode: SequenceRequest


class Sequence:
    """Owned by one `Router.generate`.

    `tokens`: output tokens given to the client so far. `prompt_due`: positions of the prompt whose log probabilities the client waits
    for. `num_failed`: attempts that failed; `num_full`: those that found no room.
    `last_kind`: the kind of the last failure, None before the first. `record`: its timeline; its id is the sequence's.
    """

    def __init__(self, record: SequenceRecord, prompt: list[int], sampling: Sampling, deadline_s: float, max_attempts: int):
        self.record = record
        self.request_id = record.sequence_id
        self.prompt = list(prompt)
        self.sampling = sampling
        self.deadline_s = deadline_s
        self.max_attempts = max_attempts
        self.tokens: list[int] = []
        self.prompt_due = range(0) if sampling.prompt_logprobs is None else range(1, len(prompt))
        self.tried = Tried()
        self.num_failed = 0
        self.num_full = 0
        self.last_failure = ""
        self.last_kind: str | None = None
        self._cached_tokens: int | None = None

    @property
    def is_last_attempt(self) -> bool:
        """Whether the attempt to come is the last after others have failed; then nothing is left to transfer."""
        return 0 < self.num_failed == self.max_attempts - 1

    def gave(self, token: int) -> None:
        """The client is given `token` now."""
        self.tokens.append(token)
        if len(self.tokens) <= 2:
            self.record.gave_token()

    def gave_prompt(self, scored: list[PromptToken]) -> None:
        """The client is given the log probabilities that come next now."""
        self.prompt_due = self.prompt_due[len(scored) :]

    def current_prompt(self) -> list[int]:
        """The client's prompt and every output token given so far: what the next attempt starts from."""
        return self.prompt + self.tokens

    def requests(self, pair: Pair, room: int) -> PairRequests:
        """The next attempt, in `room`. The room tells it from an earlier one that may still be on its way out of a worker."""
        self.tried.fingerprint = pair.decode.info.layout.model_fingerprint
        without_prompt = msgspec.structs.replace(self.sampling, prompt_logprobs=None)

        def request(prefill: bool) -> SequenceRequest:
            computes_prompt = not (prefill and pair.prefill is not None)
            return SequenceRequest(
                request_id=self.request_id,
                room=room,
                prompt=self.current_prompt(),
                num_prior=len(self.tokens),
                sampling=self.sampling if self.prompt_due and computes_prompt else without_prompt,
                deadline_s=self.deadline_s,
                prefill=pair.prefill.info.peer if prefill and pair.prefill is not None else None,
            )

        return PairRequests(None if pair.prefill is None else request(prefill=False), request(prefill=True))

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        """Keep the first count that any attempt reports: later ones also find what earlier ones have computed."""
        if self._cached_tokens is None:
            self._cached_tokens = cached_tokens

    def finished(self, finished: Finished) -> Finished:
        """`finished` as the client shall see it."""
        cached_tokens = min(self._cached_tokens or 0, len(self.prompt))
        return Finished(reason=finished.reason, stop_token=finished.stop_token, cached_tokens=cached_tokens)

    def complete(self) -> Finished | None:
        """The end of the answer where the tokens given so far already make it whole."""
        if not self.tokens:
            return None
        reason = answer_end(self.tokens[-1], len(self.tokens) - 1, self.sampling)
        if reason is None:
            return None
        return self.finished(Finished(reason=reason, stop_token=self.tokens[-1] if reason == "stop" else None))

    def note_failure(self, pair: Pair, broken: Broken) -> None:
        """Learn from a failed attempt. Raises BadRequest, DeadlineExceeded or WorkerFailed where no other attempt can help.

        A refusal for lack of room costs no attempt. The KV's way has two ends, so both count as failed where it broke.
        """
        failed, worker = broken.failed, pair.worker(broken.side)
        self.last_failure = f"{broken.side.value} worker {worker.info.peer.address} failed ({failed.kind}): {failed.message}"
        self.last_kind = failed.kind
        if failed.kind == "over_capacity":
            self.num_full += 1
            self.tried.full.add(worker.instance_id)
            return
        self._raise_if_final(failed, pair)
        self.num_failed += 1
        if self.num_failed >= self.max_attempts:
            raise WorkerFailed(f"{self.num_failed} attempts failed, the last: {self.last_failure}")
        if failed.kind not in ("bootstrap", "transfer") or pair.prefill is None:
            self.tried.failed.add(worker.instance_id)
        elif failed.retriable:
            self.tried.failed |= {pair.prefill.instance_id, pair.decode.instance_id}
        else:
            self.tried.refused.add((pair.prefill.instance_id, pair.decode.instance_id))

    def _raise_if_final(self, failed: Failed, pair: Pair) -> None:
        """`aborted` is never final: this router did not ask for it."""
        if failed.kind == "rejected" and not self.tokens:
            raise BadRequest(failed.message)
        if failed.kind == "deadline":
            raise DeadlineExceeded(f"request {self.request_id}: {failed.message}")
        is_refused_pair = failed.kind in ("bootstrap", "transfer") and pair.prefill is not None
        if not failed.retriable and failed.kind != "aborted" and not is_refused_pair:
            raise WorkerFailed(self.last_failure)
