"""The Python API: a whole system in one process, prefill and decode on different devices, for notebooks and scripts."""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

from pdjax.api.chat_template import ChatTemplate
from pdjax.api.completion import Completion, Completions
from pdjax.api.generation import Delta, TextRequest, generate_text, plan
from pdjax.api.prompts import check_ids
from pdjax.api.sampling_params import SamplingParams
from pdjax.api.tokenizer import Tokenizer
from pdjax.config.load import load_config
from pdjax.config.schema import Config
from pdjax.errors import BadRequest
from pdjax.local_system import LocalSystem
from pdjax.observe.progress import NullProgress, Progress
from pdjax.observe.timeline_picture import TimelinePicture
from pdjax.observe.timeline_view import view
from pdjax.observe.timelines import RequestRecord

_T = TypeVar("_T")

Prompt = str | Sequence[int]

MAX_WAITING_DELTAS = 64
"""Deltas between the event loop and a slow reader of `LLM.stream`; past that the reader holds the generation back."""


class LLM:
    """Loads a model and generates. A context manager; `close` gives devices and threads back.

    `config`: a file as for `python -m pdjax.serve`, or a `Config`; `overrides` are `section.field=value`. Threads of any number may call;
    their requests are batched together. Not to be used after `close`.
    """

    def __init__(self, config: str | Config = "configs/notebook.yaml", overrides: Sequence[str] = (), progress: Progress | None = None):
        """Blocks until everything is compiled. Raises ValueError for a bad configuration, before anything is loaded."""
        self.config = config if isinstance(config, Config) else load_config(config, list(overrides))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdjax-loop", daemon=True)
        self._thread.start()
        self._ids = itertools.count()
        try:
            self._system = LocalSystem.load(self.config, self._loop, progress or NullProgress())
            self._run(self._system.start())
        except BaseException:
            self._stop_loop()
            raise
        data = self._system.checkpoint.tokenizer_data()
        self.tokenizer = Tokenizer(data)
        self._chat_template = ChatTemplate.from_data(data)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Completions:
        """Answers to `prompts` (texts or token ids), `params.n` for each, in order. All run at the same time.

        Raises BadRequest (a ValueError) before any work where one of them cannot be served; PdjaxError where the system fails.
        """
        requests = self._requests(_as_list(prompts), params or SamplingParams())
        return self._run(self._complete_all(requests))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The answer to one prompt, step by step. Closing the iterator, or dropping it, stops the work."""
        requests = self._requests([prompt], params or SamplingParams())
        if len(requests) != 1:
            raise BadRequest(f"n is {len(requests)}; a stream carries one answer", "n")
        return self._stream(requests[0])

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> Completions:
        """Answers to a conversation, by the model's own chat template."""
        return self.generate([self.chat_prompt(messages)], params)

    def chat_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for `generate` and `stream`. Raises BadRequest where the template refuses it."""
        if self._chat_template is None:
            raise BadRequest("the model has no chat template", "messages")
        return self.tokenizer.encode(self._chat_template.render(messages, add_generation_prompt=True))

    def timeline(self, completion: Completion) -> TimelinePicture:
        """Where the time of one answer went, on both workers. Only the last 256 sequences are remembered; raises KeyError for others."""
        return self._run(self._timeline(completion.request_id))

    def close(self) -> None:
        """Stop everything. Idempotent."""
        if not self._loop.is_closed():
            self._run(self._system.stop())
            self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _requests(self, prompts: list[Prompt], params: SamplingParams) -> list[TextRequest]:
        card = self._system.router.model_card()
        ids = [check_ids(self._encode(prompt), card, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        deadline_s = time.time() + self.config.server.request_timeout_s
        return plan(card, ids, params, self.config.server.default_max_tokens, f"llm-{next(self._ids)}-{secrets.token_hex(4)}", deadline_s)

    def _encode(self, prompt: Prompt) -> list[int]:
        return [*self.tokenizer.first_ids, *self.tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)

    async def _complete_all(self, requests: list[TextRequest]) -> Completions:
        # A job may hold more sequences than the router takes at a time.
        room = asyncio.Semaphore(self.config.router.max_in_flight)

        async def complete(request: TextRequest) -> Completion:
            async with room:
                return await self._complete(request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(complete(request)) for request in requests]
        return Completions(task.result() for task in tasks)

    async def _complete(self, request: TextRequest) -> Completion:
        began_s = time.perf_counter()
        deltas, times_s = [], []
        async for delta in generate_text(self._system.router, self.tokenizer, request):
            deltas.append(delta)
            times_s.append(time.perf_counter() - began_s)
        finish = deltas[-1].finish
        assert finish is not None, f"{request.request_id} ended without a finish"
        steps = [(delta.token, delta.text_offset, time_s) for delta, time_s in zip(deltas, times_s, strict=True) if delta.token is not None]
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            text="".join(delta.text for delta in deltas),
            tokens=[token for token, _, _ in steps],
            text_offsets=[offset for _, offset, _ in steps],
            token_times_s=[time_s for _, _, time_s in steps],
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            cached_tokens=finish.cached_tokens,
            prompt_logprobs=[token for delta in deltas if delta.prompt is not None for token in delta.prompt.tokens],
        )

    async def _timeline(self, sequence_id: str) -> TimelinePicture:
        """In the event loop, which writes what is read here."""
        record = self._system.router.timelines.find(sequence_id.rpartition("-")[0])
        sequences = [] if record is None else [each for each in record.sequences if each.sequence_id == sequence_id]
        if not sequences:
            raise KeyError(f"{sequence_id} is not remembered")
        return TimelinePicture(view(RequestRecord(sequence_id, None, sequences)))

    def _stream(self, request: TextRequest) -> Iterator[Delta]:
        deltas: queue.Queue[Delta | BaseException | None] = queue.Queue(MAX_WAITING_DELTAS)
        room = asyncio.Semaphore(MAX_WAITING_DELTAS - 1)
        pump = asyncio.run_coroutine_threadsafe(self._pump(request, deltas, room), self._loop)
        try:
            while (delta := deltas.get()) is not None:
                if isinstance(delta, BaseException):
                    raise delta
                self._loop.call_soon_threadsafe(room.release)
                yield delta
        finally:
            pump.cancel()

    async def _pump(self, request: TextRequest, deltas: queue.Queue[Delta | BaseException | None], room: asyncio.Semaphore) -> None:
        """Carry deltas over. The semaphore keeps one place of the queue free for the end."""
        try:
            async with aclosing(generate_text(self._system.router, self.tokenizer, request)) as source:
                async for delta in _limited(source, room):
                    deltas.put_nowait(delta)
            deltas.put_nowait(None)
        except Exception as error:
            deltas.put_nowait(error)

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _limited(source: AsyncIterator[Delta], room: asyncio.Semaphore) -> AsyncIterator[Delta]:
    async for delta in source:
        await room.acquire()
        yield delta


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)
