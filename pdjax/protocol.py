"""The words that processes exchange: one place for every message, state and limit that crosses a process border.

All messages are `msgspec` structs, sent as msgpack and validated on arrival; nothing is ever unpickled. This module imports
nothing of the project, so every package may use it, the pure-Python scheduler included.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

PROTOCOL_VERSION = 2
"""Raised whenever a message changes its meaning; peers of different versions refuse each other."""

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 20
PROMPT_TOKENS_PER_MESSAGE = 256
"""Prompt tokens whose log probabilities go into one message: at most 0.1 MB with all alternatives, however long the prompt."""
class KVPoll(enum.IntEnum):
    """State of one room on one side. Updates only move up; FAILED is sticky; over several ranks the minimum counts."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What two workers must agree on before the KV of one means anything to the other. `kv_scales`: a digest; empty where KV has none."""

    protocol_version: int = PROTOCOL_VERSION
    model_fingerprint: str
    page_size: int
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_scales: str = ""

    def mismatch(self, other: Layout) -> str | None:
        """Name every field in which `other` differs, with both values; None where the two agree."""
        differing = [
            f"{name} {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
        return "; ".join(differing) or None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Token-level sampling parameters, complete: every default has been resolved before a request reaches a worker.

    `max_tokens` and `min_tokens` count output tokens from the start of the answer, tokens of earlier attempts included.
    `stop_token_ids` already holds the model's end-of-sequence ids unless the client asked to ignore them.
    `seed` is always set; token number i of an answer is drawn with `fold_in(seed, i)`, wherever and with whomever it is computed.
    `logprobs` None: none wanted; 0: the chosen token's; k: also the k best. `prompt_logprobs`: the same of the prompt's tokens; only the
    worker that computes the prompt is asked for them.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def uses_history(self) -> bool:
        """Whether the sampler must know which tokens the prompt and the answer hold."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Peer(msgspec.Struct, frozen=True):
    """Another worker: where it listens and which process start is expected there."""

    address: str
    instance_id: str


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one sequence, as the router hands it to a worker.

    `prompt` ends with the `num_prior` output tokens that the client already has (0 on a first attempt). `room` is a fresh random
    63-bit number for each attempt. `deadline_s` is absolute, seconds since the epoch. `prefill` is the worker that will
    send the KV; None where the receiving worker computes the prompt itself.
    """

    request_id: str
    room: int
    prompt: list[int]
    num_prior: int = 0
    sampling: Sampling
    deadline_s: float
    prefill: Peer | None = None


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One output token. `index` counts from the start of the answer, over all attempts.

    `cached_tokens`, with the first token of an attempt: prompt tokens that did not have to be computed.
    """

    index: int
    token: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    cached_tokens: int | None = None


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """How likely the model finds the prompt's token at `position` behind those before it; `top_logprobs`: the best instead of it.

    `logprob` None: of the first token, which follows nothing; it does not travel between processes.
    """

    position: int
    token: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]] = []


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """`prompt`: at most PROMPT_TOKENS_PER_MESSAGE, in order; those of a prompt come before its first output token."""

    tokens: list[TokenOut]
    prompt: list[PromptToken] = []


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """Something that a request went through on one worker, in seconds of the worker's wall clock; `end_s` >= `start_s`.

    `track` "": one of the stages that follow each other without gaps from the request's arrival at the worker to its end there.
    Otherwise it happened beside them, and the track says what it belongs to: "bootstrap", "chunks", "sends", "transfer", "receives",
    "retries". `count`: tokens of a chunk, pages of a send or receipt.
    """

    name: str
    start_s: float
    end_s: float
    track: str = ""
    count: int = 0


class Finished(msgspec.Struct, frozen=True, tag="finished", kw_only=True):
    """The worker's part ended well. `handed_off`: prefill has delivered everything and decode goes on.

    `stages`: a bounded number; first those that follow each other, then the others.
    """

    reason: Literal["stop", "length", "handed_off"]
    stop_token: int | None = None
    cached_tokens: int = 0
    stages: list[Stage] = []


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The worker's part ended badly. `retriable`: another attempt, perhaps elsewhere, may succeed. `stages`: as in `Finished`."""

    kind: Literal["rejected", "over_capacity", "deadline", "aborted", "bootstrap", "transfer", "internal"]
    message: str
    retriable: bool
    stages: list[Stage] = []


Event = Tokens | Finished | Failed


class WorkerInfo(msgspec.Struct, frozen=True, tag="info", kw_only=True):
    """First message of a worker to a router. `role`: what it accepts; a decode worker also computes prompts itself."""

    role: Literal["prefill", "decode"]
    peer: Peer
    layout: Layout
    model_name: str
    max_context_tokens: int
    max_prompt_tokens: int
    max_running: int


class WorkerLoad(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    """Sent every heartbeat. Counts of sequences and pages; `ready` once everything is compiled.

    `gauges`: further figures for the router's metrics page, by name: `NAME` or `NAME{LABEL=VALUE}`; a NAME that ends with `_total` only
    ever rises.
    """

    ready: bool
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    gauges: dict[str, float] = {}


class WorkerLeaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The worker shuts down in order: no new work, please."""


class RouterHello(msgspec.Struct, frozen=True, tag="hello"):
    """The router's answer to every message of a worker."""

    instance_id: str


MembershipMessage = WorkerInfo | WorkerLoad | WorkerLeaving


class Announce(msgspec.Struct, frozen=True, kw_only=True):
    """Decode to prefill: `room` has everything reserved; send what lies past `decode_prefix_tokens` (a multiple of the page size).

    `transport`: how the receiver takes chunks; both sides must be configured alike.
    """

    room: int
    decode_prefix_tokens: int
    layout: Layout
    sender_instance_id: str
    receiver: Peer
    transport: str = "tcp"


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    instance_id: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    message: str


class ChunkHead(msgspec.Struct, frozen=True, tag="head"):
    """Announces one chunk: pages `first_page .. first_page + num_pages` of the prompt, whose `num_bytes` come next on the room's data
    connection to `address` (host:port; `pdjax.transfer.tcp_link`).

    `checksum` is xxh3-64 over the chunk's bytes.
    """

    first_page: int
    num_pages: int
    num_bytes: int
    checksum: int
    address: str


class ChunkOffer(msgspec.Struct, frozen=True, tag="offer"):
    """Announces one chunk that is to be pulled: pages `first_page .. first_page + num_pages` of the prompt, in an array of `num_rows`
    rows that `address` gives out under `uuid`, once. The receiver answers with `ChunkPulled` when it has it.

    `checksum` is of the whole array, padding rows included (`pdjax.transfer.checksum`).
    """

    first_page: int
    num_pages: int
    num_rows: int
    address: str
    uuid: int
    checksum: int


class ChunkPulled(msgspec.Struct, frozen=True):
    """Decode to prefill: the chunk that was offered under `uuid` is here and good."""

    room: int
    uuid: int


class PulledReply(msgspec.Struct, frozen=True):
    """The answer to `ChunkPulled`, whatever is offered under that uuid: the room's stream says whether the room lives."""


class ChunkLast(msgspec.Struct, frozen=True, tag="last"):
    """Everything has been sent: `num_pages` in all, and the metadata row."""

    num_pages: int
    metadata: bytes


class SendFailed(msgspec.Struct, frozen=True, tag="send_failed"):
    message: str


KVFrame = Accepted | Refused | ChunkHead | ChunkOffer | ChunkLast | SendFailed
