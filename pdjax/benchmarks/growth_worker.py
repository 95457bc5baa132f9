"""`python -m pdjax.benchmarks.growth_worker`: a prefill and a decode worker without an engine, in one process, for measuring the router.

Both join a router like real ones and answer at once: prefill with the first token, decode with all the others, one message a token. What
a message costs in a router depends on neither the model nor the engine, so these show what the router can do at best.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from pdjax import rpc
from pdjax.children import adopt_parent
from pdjax.config.schema import Config
from pdjax.observe.progress import PipeProgress
from pdjax.observe.signals import stop_signals
from pdjax.protocol import Event, Finished, Layout, Peer, SequenceRequest, TokenOut, Tokens, WorkerInfo, WorkerLoad
from pdjax.worker.membership import RouterLink

FIRST_TOKEN, NUM_TOKENS = 1000, 1000
"""Answers count through token ids that are pieces of words in most vocabularies."""

LAYOUT = Layout(model_fingerprint="loopback", page_size=16, kv_dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1)
MAX_RUNNING = 4096
FREE_PAGES = 1 << 20

ROLES = ("prefill", "decode")


def answer_token(index: int) -> int:
    """Token number `index` of every answer."""
    return FIRST_TOKEN + index % NUM_TOKENS


def prefill_events(request: SequenceRequest) -> list[Event]:
    """What a prefill worker says: the first token, and that it has handed over, or that this token was the last."""
    first = TokenOut(request.num_prior, answer_token(request.num_prior), cached_tokens=0)
    is_last = first.index + 1 >= request.sampling.max_tokens
    return [Tokens([first]), Finished(reason="length" if is_last else "handed_off")]


def decode_events(request: SequenceRequest) -> list[Event]:
    """What a decode worker says: every token behind prefill's, or all where no prefill worker has part, and the end."""
    start = request.num_prior + (request.prefill is not None)
    events: list[Event] = [Tokens([TokenOut(index, answer_token(index))]) for index in range(start, request.sampling.max_tokens)]
    return [*events, Finished(reason="length")]


async def _serve_prefill(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[Event]:
    for event in prefill_events(request):
        yield event


async def _serve_decode(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[Event]:
    if request.prefill is not None and request.sampling.max_tokens <= request.num_prior + 1:
        await asyncio.Event().wait()  # prefill's token ends the answer; the router lets go of this call
    for event in decode_events(request):
        yield event


class StandIn:
    """One worker: a gRPC server and a membership. For one event loop."""

    def __init__(self, role: str, config: Config):
        self._role = role
        self._config = config
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)

    async def start(self) -> str:
        """The address."""
        serve = _serve_prefill if self._role == "prefill" else _serve_decode
        service, name = (rpc.PREFILL if self._role == "prefill" else rpc.DECODE).lstrip("/").split("/")
        handler = grpc.unary_stream_rpc_method_handler(serve, request_deserializer=rpc.decoder(SequenceRequest), response_serializer=rpc.encode)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = self._server.add_insecure_port(f"{self._config.worker.host}:0")
        await self._server.start()
        peer = Peer(f"{self._config.worker.host}:{port}", secrets.token_hex(8))
        router = self._config.worker.router or f"{self._config.router.control_host}:{self._config.router.control_port}"
        self._link = RouterLink(router, worker_info(self._role, peer, self._config), _load, self._config.worker.heartbeat_interval_s)
        self._link.start()
        return peer.address

    async def stop(self) -> None:
        await self._link.leave()
        await self._server.stop(None)


def worker_info(role: str, peer: Peer, config: Config) -> WorkerInfo:
    longest = config.model.max_context_tokens
    return WorkerInfo(
        role=role,
        peer=peer,
        layout=LAYOUT,
        model_name="loopback",
        max_context_tokens=longest,
        max_prompt_tokens=longest - 1,
        max_running=MAX_RUNNING,
    )


def _load() -> WorkerLoad:
    return WorkerLoad(ready=True, free_pages=FREE_PAGES)


async def run(config: Config, ready: Callable[..., None]) -> None:
    """Serve until SIGTERM or SIGINT. Main thread only."""
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    workers = [StandIn(role, config) for role in ROLES]
    addresses = [await worker.start() for worker in workers]
    ready(**dict(zip(ROLES, addresses, strict=True)))
    await stop.wait()
    await asyncio.gather(*(worker.stop() for worker in workers))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdjax.benchmarks.growth_worker", description="Stand-in workers for benchmarks.")
    parser.add_argument("--child", type=int, required=True, metavar="FD", help="progress pipe; the configuration comes on standard input")
    args = parser.parse_args()
    config = Config.model_validate_json(adopt_parent(), strict=True)
    asyncio.run(run(config, PipeProgress(args.child).ready))
    return 0


if __name__ == "__main__":
    sys.exit(main())
