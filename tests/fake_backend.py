"""A backend whose answers are written down beforehand, a vocabulary of bytes, and a real HTTP server around both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import httpx
import openai
import uvicorn
from prometheus_client import CollectorRegistry

from pdjax.api.app import create_app
from pdjax.api.backend import Backend, ModelCard, Part, ScoredPrompt
from pdjax.api.chat_template import ChatTemplate
from pdjax.api.tokenizer import Tokenizer, _byte_alphabet
from pdjax.checkpoints.base import TokenizerData
from pdjax.config.schema import ServerConfig
from pdjax.errors import NoWorker
from pdjax.protocol import Finished, PromptToken, Sampling, TokenOut

EOS = 256
TURN = 257
HELLO = 258  # "hello "
VOCAB_SIZE = 259
MODEL = "fake-model"
CARD = ModelCard(MODEL, VOCAB_SIZE, max_context_tokens=64, max_prompt_tokens=48, eos_token_ids=(EOS,))
TEMPLATE = "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
WAIT_S = 10.0
"""Far longer than anything here takes."""


def byte_tokenizer() -> Tokenizer:
    """Token i < 256 is byte i; then the end, the start of a turn (both special), and "hello "."""
    by_byte = {byte: char for char, byte in _byte_alphabet().items()}
    tokens = (*(by_byte[i] for i in range(256)), "<end>", "<turn>", "helloĠ")
    return Tokenizer(TokenizerData(tokens, (), frozenset((EOS, TURN)), frozenset(), "gpt-2", None, None, EOS))


class Call(NamedTuple):
    """What the backend was asked."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    deadline_s: float


def token_out(index: int, token: int, sampling: Sampling) -> TokenOut:
    """Logprob of output i is -(i + 1) / 8; alternative k (0: the token itself) is token - k, and k / 4 less likely."""
    if sampling.logprobs is None:
        return TokenOut(index, token)
    logprob = -(index + 1) / 8
    return TokenOut(index, token, logprob, [(max(token - k, 0), logprob - k / 4) for k in range(sampling.logprobs)])


def prompt_tokens(prompt: list[int], num_top: int) -> list[PromptToken]:
    """Logprob of prompt token i is -i; alternative k (0: the token itself) is token - k, and k / 4 less likely."""
    return [
        PromptToken(i, token, -float(i), [(max(token - k, 0), -i - k / 4) for k in range(num_top)])
        for i, token in enumerate(prompt)
        if i > 0
    ]


class FakeBackend(Backend):
    """Answers each prompt with `script(prompt)`, cut at stop tokens and max_tokens as workers cut it.

    `hold_at` k: blocks for ever before output token k. `fail_at` k: raises `error` there. `ready` False: raises NoWorker everywhere.
    Prompt log probabilities come `prompt_chunk` tokens at a time. A call keeps the settings that it began with. Counts of open generators
    are exact at any moment; wait for them with `wait_until_open`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        self.script: Callable[[list[int]], list[int]] = lambda prompt: [*b"abcdef", EOS]
        self.calls: list[Call] = []
        self.hold_at: int | None = None
        self.fail_at: int | None = None
        self.error: Exception = RuntimeError("secret detail")
        self.ready = True
        self.cached_tokens = 0
        self.num_open = 0
        self.prompt_chunk = 3

    def model_card(self) -> ModelCard:
        if not self.ready:
            raise NoWorker("no worker has registered")
        return CARD

    def is_ready(self) -> bool:
        return self.ready

    async def generate(self, request_id: str, prompt: list[int], sampling: Sampling, deadline_s: float) -> AsyncIterator[Part]:
        hold_at, fail_at, tokens = self.hold_at, self.fail_at, self.script(prompt)
        self.calls.append(Call(request_id, prompt, sampling, deadline_s))
        self._count(1)
        try:
            if sampling.prompt_logprobs is not None:
                scored = prompt_tokens(prompt, sampling.prompt_logprobs)
                for start in range(0, len(scored), self.prompt_chunk):
                    yield ScoredPrompt(scored[start : start + self.prompt_chunk])
            for index in range(len(tokens) + 1):
                await asyncio.sleep(0)
                if index == hold_at:
                    await asyncio.Event().wait()
                if index == fail_at:
                    raise self.error
                yield token_out(index, tokens[index], sampling)
                if tokens[index] in sampling.stop_token_ids:
                    yield Finished(reason="stop", stop_token=tokens[index], cached_tokens=self.cached_tokens)
                    return
                if index + 1 == sampling.max_tokens:
                    yield Finished(reason="length", cached_tokens=self.cached_tokens)
                    return
        finally:
            self._count(-1)

    def wait_until_open(self, num_open: int) -> None:
        """Blocks until exactly `num_open` generators are open. Fails after WAIT_S."""
        with self._changed:
            reached = self._changed.wait_for(lambda: self.num_open == num_open, WAIT_S)
        assert reached, f"{self.num_open} generators are open, expected {num_open}"

    def _count(self, change: int) -> None:
        with self._changed:
            self.num_open += change
            self._changed.notify_all()


class Served(NamedTuple):
    """A running server. `http` knows its address; one client for all tests, since making one takes longer than a test."""

    http: httpx.Client
    port: int
    backend: FakeBackend
    registry: CollectorRegistry

    def client(self, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=max_retries, http_client=self.http)


@contextlib.contextmanager
def serve(server: ServerConfig | None = None) -> Iterator[Served]:
    """Run the application in a thread, on a free port, until the block ends."""
    backend, registry = FakeBackend(), CollectorRegistry()
    app = create_app(backend, byte_tokenizer(), ChatTemplate(TEMPLATE), server or ServerConfig(default_max_tokens=20), registry)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        runner = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + WAIT_S
            while not runner.started and time.monotonic() < deadline:
                time.sleep(0.01)
            assert runner.started, "the server has not started"
            port = listener.getsockname()[1]
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as http:
                yield Served(http, port, backend, registry)
        finally:
            runner.should_exit = True
            thread.join(WAIT_S)
    assert not thread.is_alive(), "the server has not stopped"
