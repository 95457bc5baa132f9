"""Log probabilities of prompts through the router: who is asked for them, and that a client gets each once, whatever fails."""

from __future__ import annotations

import time

import pytest

from pdjax.api.backend import ScoredPrompt
from pdjax.protocol import Finished, PromptToken, Sampling, SequenceRequest, TokenOut, Tokens
from tests.test_router_fakes import HANG, Rig, Step, answer, cut, decode_steps, lost, prefill_steps, run

PROMPT = [5, 6, 7, 8, 9]


def scored(request: SequenceRequest) -> list[Step]:
    """What a worker tells of the prompt that it computes, if it is asked: two tokens a message."""
    if request.sampling.prompt_logprobs is None:
        return []
    num_prompt = len(request.prompt) - request.num_prior
    tokens = [PromptToken(i, request.prompt[i], -float(sum(request.prompt[:i]))) for i in range(1, num_prompt)]
    return [Tokens([], tokens[start : start + 2]) for start in range(0, len(tokens), 2)]


def prefill(request: SequenceRequest) -> list[Step]:
    return [*scored(request), *prefill_steps(request)]


def decode(request: SequenceRequest) -> list[Step]:
    return [*scored(request), *decode_steps(request)]


async def collect(rig: Rig, prompt: list[int] = PROMPT, num_top: int | None = 0) -> list[int]:
    """The answer; checks that all of the prompt comes before it, each position once, in order."""
    sampling = Sampling(max_tokens=5, prompt_logprobs=num_top)
    told: list[PromptToken] = []
    tokens: list[int] = []
    async for part in rig.router.generate("r", prompt, sampling, time.time() + 60.0):
        if isinstance(part, ScoredPrompt):
            assert not tokens
            told += part.tokens
        elif isinstance(part, TokenOut):
            tokens.append(part.token)
        else:
            assert isinstance(part, Finished)
    assert [(token.position, token.token, token.logprob) for token in told] == [
        (i, prompt[i], -float(sum(prompt[:i]))) for i in range(1, len(prompt)) if num_top is not None
    ]
    return tokens


def test_only_the_worker_that_computes_the_prompt_is_asked_about_it() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("p1", prefill)
        rig.plan("d1", decode)
        assert await collect(rig) == answer(PROMPT, 5)
        assert rig.workers["p1"].calls[0].sampling.prompt_logprobs == 0
        assert rig.workers["d1"].calls[0].sampling.prompt_logprobs is None
        rig.assert_nothing_held()

    run(scenario)


def test_a_decode_worker_without_a_prefill_worker_is_asked() -> None:
    async def scenario() -> None:
        rig = Rig("d1")
        rig.plan("d1", decode)
        assert await collect(rig) == answer(PROMPT, 5)

    run(scenario)


def test_nobody_is_asked_where_nobody_wants_to_know_or_there_is_nothing_to_know() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        await collect(rig, num_top=None)
        await collect(rig, prompt=[5])
        assert [call.sampling.prompt_logprobs for call in rig.workers["p1"].calls] == [None, None]

    run(scenario)


@pytest.mark.parametrize("num_told", range(4))
def test_an_attempt_that_dies_anywhere_repeats_nothing_of_the_prompt(num_told: int) -> None:
    """Two messages tell the prompt, the third event is the first token: after that the next attempt is not asked any more."""

    async def scenario() -> None:
        rig = Rig("p1 p2 d1")
        rig.plan("p1", cut(prefill, num_told))
        rig.plan("p2", prefill)
        rig.plan("d1", lambda request: [HANG], decode)
        assert await collect(rig) == answer(PROMPT, 5)
        (retry,) = rig.workers["p2"].calls
        assert retry.sampling.prompt_logprobs == (0 if num_told < 2 else None)
        rig.assert_nothing_held()

    run(scenario)


def test_the_last_attempt_asks_decode() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", max_attempts=2)
        rig.plan("p1", cut(prefill, 1))
        rig.plan("d1", lambda request: [HANG], decode)
        assert await collect(rig) == answer(PROMPT, 5)
        assert rig.workers["d1"].calls[-1].sampling.prompt_logprobs == 0

    run(scenario)


def test_a_worker_that_forgets_the_prompt_is_tried_no_further() -> None:
    async def scenario() -> None:
        rig = Rig("p1 p2 d1")
        rig.plan("p1", lambda request: [scored(request)[0], *prefill_steps(request)[:1], lost()])
        rig.plan("p2", prefill)
        rig.plan("d1", lambda request: [HANG], decode)
        assert await collect(rig) == answer(PROMPT, 5)
        assert len(rig.workers["p2"].calls) == 1

    run(scenario)
