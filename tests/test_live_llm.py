"""The Python API: router, prefill and decode in one process on two virtual devices.

JAX can be given two CPU devices only before its first use, so each test runs a program of its own: this module, as `__main__`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.goldens import load_goldens
from tests.live import COMPILE_CACHE, NUM_PAGES, ROOT, WINDOW

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
NAMES = ("chat-capital", "story", "tokens-15", "tokens-16", "tokens-33", "emoji", "tokens-513")
OVERRIDES = [
    f"engine.num_pages={NUM_PAGES}",
    f"engine.max_running={WINDOW}",
    "engine.max_prefill_seqs=4",
    "engine.prefill_buckets=[64, 256]",
    f"engine.decode_buckets=[1, {WINDOW}]",
    "engine.transfer_buckets=[4, 32]",
    f"engine.compile_cache={json.dumps(str(COMPILE_CACHE))}",
]


def run_program(what: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", "tests.test_live_llm", what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


def test_one_process_answers_as_the_reference_does_and_gives_everything_back() -> None:
    told = run_program("answers")
    assert told["together"] == {name: GOLDENS[name].output_ids for name in NAMES}
    assert told["chat"] == ["The capital of France is Paris.", "stop"]
    assert told["streamed"] == GOLDENS["story"].output_ids
    assert told["drawn"][0] == told["drawn"][1] and len({tuple(ids) for ids in told["drawn"][0]}) == 2
    assert told["refused"] == "prompts[0] has 3000 tokens, this server takes at most 1776"
    assert told["scored"] == [len(GOLDENS["story"].prompt_ids), [], "length"]
    assert told["prompt"][0] is None
    assert told["prompt"][-4:] == pytest.approx(told["answer"], abs=2e-3)
    assert told["held_after_early_close"] == 0
    assert told["after_early_close"] == GOLDENS["story"].output_ids
    assert told["threads_left"] == []


def test_a_second_system_works_after_the_first_has_been_closed() -> None:
    told = run_program("twice")
    assert told["answers"] == [GOLDENS["chat-capital"].output_ids] * 2
    assert told["threads_left"] == []


def _answers() -> dict[str, Any]:
    from pdjax import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=24)
    drawn = SamplingParams(temperature=1.0, max_tokens=8, seed=3, n=2)
    told: dict[str, Any] = {}
    with LLM("configs/notebook.yaml", OVERRIDES) as llm:
        answers = llm.generate([GOLDENS[name].prompt_ids for name in NAMES], greedy)
        told["together"] = {name: answer.token_ids for name, answer in zip(NAMES, answers, strict=True)}
        [answer] = llm.chat(GOLDENS["chat-capital"].messages or [], greedy)
        told["chat"] = [answer.text, answer.finish_reason]
        told["streamed"] = [delta.token.token for delta in llm.stream(GOLDENS["story"].prompt_ids, greedy) if delta.token]
        told["drawn"] = [[answer.token_ids for answer in llm.generate(GOLDENS["story"].prompt_ids, drawn)] for _ in range(2)]
        try:
            llm.generate([[504] * 3000], greedy)
        except ValueError as error:
            told["refused"] = str(error)
        story = GOLDENS["story"]
        [scored] = llm.generate([story.prompt_ids], SamplingParams(max_tokens=0, prompt_logprobs=2))
        told["scored"] = [len(scored.prompt_logprobs), scored.token_ids, scored.finish_reason]
        [answer] = llm.generate([story.prompt_ids], SamplingParams(temperature=0, max_tokens=4, logprobs=0))
        told["answer"] = [token.logprob for token in answer.tokens]
        [scored] = llm.generate([story.prompt_ids + answer.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        told["prompt"] = [token.logprob for token in scored.prompt_logprobs]
        told["held_after_early_close"] = _close_early(llm)
        told["after_early_close"] = llm.generate(GOLDENS["story"].prompt_ids, greedy)[0].token_ids
    return told


def _close_early(llm: Any) -> float:
    """Sequences and slots that are held some time after a reader has lost interest."""
    from pdjax import SamplingParams

    stream = llm.stream(GOLDENS["story"].prompt_ids, SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True))
    next(stream)
    stream.close()
    held = 1.0
    end_s = time.monotonic() + 10.0
    while held and time.monotonic() < end_s:
        time.sleep(0.1)
        loads = [worker.loop.role.load() for worker in llm._system._workers.values()]
        held = sum(load.running + load.gauges["slots_held"] + load.gauges["rooms_open"] for load in loads)
    return held


def _twice() -> dict[str, Any]:
    from pdjax import LLM, SamplingParams

    answers = []
    for _ in range(2):
        with LLM("configs/notebook.yaml", OVERRIDES) as llm:
            answers += llm.generate([GOLDENS["chat-capital"].prompt_ids], SamplingParams(temperature=0, max_tokens=24))
    return {"answers": [answer.token_ids for answer in answers]}


if __name__ == "__main__":
    result = {"answers": _answers, "twice": _twice}[sys.argv[1]]()
    result["threads_left"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print(json.dumps(result))
