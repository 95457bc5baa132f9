"""One host of a worker over two processes of four devices: `python -m tests.multi_host_kit INDEX PORT answers|endless`.

Host 0 prints what its engine answered as one line of JSON, or lines of tokens without end.
"""

from __future__ import annotations

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.base import StepEngine
from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.engine import Engine
from pdjax.kernels.xla import XlaAttention
from pdjax.models.shape import ModelShape
from pdjax.observe.progress import ForegroundProgress, LineBoard
from pdjax.protocol import Sampling
from pdjax.worker.hosts import LeaderEngine, end_now, follow, telling_failures
from pdjax.worker.hosts_meet import Meeting, devices_of_hosts, join, lead
from tests.engine_kit import CONFIG, SHAPE, SMALL_BLOCKS, random_weights

WIDTH, NUM_HOSTS = 8, 2
WIDE: ModelShape = SHAPE._replace(num_heads=8, num_kv_heads=4, vocab_size=64)
ENGINE = CONFIG.model_copy(update={"num_pages": 24, "decode_buckets": (1,), "max_running": 2, "prefill_buckets": (32,)})
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 61, 23)]
PAGES, OTHERS = list(range(3, 12)), list(range(12, 21))
GREEDY = Sampling(max_tokens=1000, temperature=0.0)
DRAWN = Sampling(max_tokens=1000, temperature=0.8, top_k=20, seed=7, logprobs=3, frequency_penalty=0.5, prompt_logprobs=1)


def make_engine(devices: list[jax.Device]) -> Engine:
    return Engine(WIDE, random_weights(WIDE), ENGINE, jnp.float32, devices, XlaAttention(SMALL_BLOCKS))


def decoded(engine: StepEngine, slot: int, first: int, pages: list[int], sampling: Sampling, number: int) -> list[int]:
    """Each step is launched before the one before it is read."""
    handles = [engine.launch_decode([DecodeSeq(slot, first if i == 0 else None, 23 + i, pages, sampling, i + 1)]) for i in range(number)]
    return [int(engine.read(handle).tokens[0]) for handle in handles]


def answers(engine: StepEngine) -> dict[str, object]:
    """Everything that a worker asks of an engine: chunks, sampling with history, scores, pages out through the host and in again."""
    engine.launch_prefill([PrefillSeq(0, PROMPT[:10], 0, PAGES, GREEDY, None)])
    first = int(engine.read(engine.launch_prefill([PrefillSeq(0, PROMPT[10:], 10, PAGES, GREEDY, 0)])).tokens[0])
    for start in range(0, 6, 3):  # three pages are no bucket: padded on the way out and on the way in
        chunk = np.array(engine.gather(PAGES[start : start + 3]))[:3]
        assert chunk.any(), "pages of zeros would prove nothing"
        engine.install(OTHERS[start : start + 3], engine.put(chunk))
    greedy = decoded(engine, 0, first, OTHERS, GREEDY, 8)
    engine.set_history(1, PROMPT, [])
    scored = PrefillSeq(1, PROMPT, 0, PAGES, DRAWN, 0, range(4, 9), PROMPT[5:10])
    step = engine.read(engine.launch_prefill([scored]))
    assert step.prompt is not None and step.logprobs is not None
    drawn = [int(step.tokens[0]), *decoded(engine, 1, int(step.tokens[0]), PAGES, DRAWN, 5)]
    logprobs = [*step.prompt.logprobs.tolist(), float(step.logprobs[0])]
    return {"greedy": [first, *greedy], "drawn": drawn, "logprobs": [round(value, 4) for value in logprobs]}


def main(index: int, port: int, what: str) -> int:
    progress = ForegroundProgress(f"host {index}", LineBoard(sys.stderr), sys.stdout)
    end = end_now(progress)
    meeting = Meeting("127.0.0.1", port, NUM_HOSTS, index, WIDTH, {"model": "toy"})
    if index:
        link = join(meeting, progress, end)
        with telling_failures([link]):
            follow(make_engine(devices_of_hosts(meeting)), link, end)
        return 0
    links = lead(meeting, progress, end)
    with telling_failures(links):
        engine = LeaderEngine(make_engine(devices_of_hosts(meeting)), links)
        engine.await_hosts()
        if what == "answers":
            print(json.dumps(answers(engine)), flush=True)
        while what == "endless":
            print(json.dumps(decoded(engine, 0, 1, OTHERS, GREEDY, 8)), flush=True)
    engine.stop_hosts()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(status)  # as `pdjax.serve` does: what had to stop has stopped
