"""From token events to text: when the backend's work has ended, and how requests are numbered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdjax.api.generation import Delta, Finish, generate_text, plan
from pdjax.api.sampling_params import SamplingParams
from pdjax.errors import BadRequest, WorkerFailed
from pdjax.protocol import Finished, Sampling, TokenOut
from tests.fake_backend import CARD, EOS, FakeBackend, byte_tokenizer


class KeepingBackend(FakeBackend):
    """Holds on to its generators, so that only closing them ends them, not their being forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[AsyncIterator[TokenOut | Finished]] = []

    def generate(self, request_id: str, prompt: list[int], sampling: Sampling, deadline_s: float) -> AsyncIterator[TokenOut | Finished]:
        self.kept.append(super().generate(request_id, prompt, sampling, deadline_s))
        return self.kept[-1]


def request(**fields):
    return plan(CARD, [[1, 2]], SamplingParams(**fields), 16, "r", 1e12)[0]


@pytest.mark.parametrize("fields, num_deltas", [({"stop": "c"}, 3), ({"max_tokens": 2}, 3), ({}, 8)])
def test_the_backend_has_stopped_when_the_last_delta_is_given(fields, num_deltas):
    async def run() -> list[int]:
        backend = KeepingBackend()
        open_at = [backend.num_open async for _ in generate_text(backend, byte_tokenizer(), request(**fields))]
        return open_at

    assert asyncio.run(run()) == [1] * (num_deltas - 1) + [0]


@pytest.mark.parametrize("num_read", [1, 2, 5])
def test_closing_the_text_stops_the_backend_at_once(num_read):
    async def run() -> int:
        backend = KeepingBackend()
        text = generate_text(backend, byte_tokenizer(), request())
        for _ in range(num_read):
            await anext(text)
        await text.aclose()
        return backend.num_open

    assert asyncio.run(run()) == 0


def test_an_answer_is_its_tokens_and_then_its_end():
    async def run() -> list[Delta]:
        backend = FakeBackend()
        backend.script = lambda prompt: [*"é!".encode(), EOS]
        return [delta async for delta in generate_text(backend, byte_tokenizer(), request())]

    assert asyncio.run(run()) == [
        Delta("", TokenOut(0, 0xC3), 0),
        Delta("é", TokenOut(1, 0xA9), 0),
        Delta("!", TokenOut(2, 33), 1),
        Delta("", TokenOut(3, EOS), 2),
        Delta("", finish=Finish("stop", None, 0)),
    ]


def test_tokens_that_break_off_are_a_failure_and_no_end():
    class BrokenOff(FakeBackend):
        async def generate(self, request_id, prompt, sampling, deadline_s):
            yield TokenOut(0, 65)

    async def run() -> None:
        async for delta in generate_text(BrokenOff(), byte_tokenizer(), request()):
            assert delta.finish is None

    with pytest.raises(WorkerFailed, match="r-0 broke off"):
        asyncio.run(run())


def test_sequences_are_numbered_prompt_by_prompt():
    requests = plan(CARD, [[1], [2]], SamplingParams(n=2, seed=5), 16, "r", 99.0)
    assert [(r.request_id, r.prompt, r.sampling.seed, r.deadline_s) for r in requests] == [
        ("r-0", [1], 5, 99.0),
        ("r-1", [1], 6, 99.0),
        ("r-2", [2], 5, 99.0),
        ("r-3", [2], 6, 99.0),
    ]


def test_one_impossible_prompt_refuses_the_whole_request():
    with pytest.raises(BadRequest):
        plan(CARD, [[1], [1] * 49], SamplingParams(), 16, "r", 99.0)
