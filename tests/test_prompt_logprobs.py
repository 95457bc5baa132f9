"""Log probabilities of prompts: the engine against a dense oracle, and whose rows are whose when sequences share steps, are retried, go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax import rpc
from pdjax.engine.batch import PrefillSeq, PromptRows, StepOutput
from pdjax.engine.engine import Engine
from pdjax.engine.steps import SCORE_BLOCK_ROWS
from pdjax.protocol import MAX_TOP_LOGPROBS, PROMPT_TOKENS_PER_MESSAGE, Event, Finished, PromptToken, Sampling, SequenceRequest
from pdjax.scheduler.chunks import Computing, PrefillPart
from pdjax.scheduler.faults import FaultHooks
from pdjax.scheduler.prompt_logprobs import LogprobCursor, max_cached_tokens, prompt_messages, rows_wanted
from pdjax.scheduler.sequence import Answer
from pdjax.worker.prefill import prefill_seq
from tests.engine_kit import CONFIG, SHAPE, dense_logprobs, make_engine, poison_pool, random_weights
from tests.scheduler_harness import Cluster, FakeRows, expected_answer, prompt_logprob

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WEIGHTS = random_weights()
TABLE = SHAPE.max_context_tokens // CONFIG.page_size
TOLERANCE = 2e-4
"""As in test_engine: float32 against float64 through two layers."""
PLAIN = Sampling(max_tokens=100, temperature=0.0)


def prompt_of(length: int, seed: int = 0, vocab: int = SHAPE.vocab_size) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


# ---- The engine ----


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Warm, and with NaN wherever nobody has written yet."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        made = make_engine()
        made.warm_up(lambda done, total, name: None)
        poison_pool(made)
        yield made
        assert made.compilations_after_warm_up() == 0


def pages_of(index: int) -> list[int]:
    return (np.random.default_rng(index).permutation(TABLE) + 1 + index * TABLE).tolist()


def chunk_of(index: int, prompt: list[int], start: int, end: int, is_scored: bool) -> PrefillSeq:
    """Tokens `start .. end` of the prompt of sequence `index`."""
    stop = min(end, len(prompt) - 1) if is_scored else start
    output_index, targets = 0 if end == len(prompt) else None, prompt[start + 1 : stop + 1]
    return PrefillSeq(index, prompt[start:end], start, pages_of(index), PLAIN, output_index, range(stop - start), targets)


def assert_rows_are(rows: PromptRows, expected: np.ndarray, targets: list[int]) -> None:
    """The rows say of `targets` what dense rows of log probabilities say, float64[n, vocab]."""
    assert len(rows) == len(targets)
    best = np.sort(expected, axis=-1)[:, ::-1][:, :MAX_TOP_LOGPROBS]
    np.testing.assert_allclose(rows.logprobs, expected[np.arange(len(targets)), targets], atol=TOLERANCE)
    np.testing.assert_allclose(rows.top_logprobs, best, atol=TOLERANCE)
    np.testing.assert_allclose(np.take_along_axis(expected, rows.top_ids, -1), best, atol=TOLERANCE)


def joined(outputs: list[StepOutput]) -> PromptRows:
    rows = [output.prompt for output in outputs if output.prompt is not None]
    arrays = zip(*((each.logprobs, each.top_ids, each.top_logprobs) for each in rows), strict=True)
    return PromptRows(*(np.concatenate(parts) for parts in arrays))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(length=st.sampled_from([2, 3, 5, 16, 17, 33, 64, 65, 70]), data=st.data())
def test_a_prompt_in_any_chunks_is_scored_as_one_dense_forward_scores_it(engine: Engine, length: int, data: st.DataObject) -> None:
    prompt, outputs, start = prompt_of(length, length), [], 0
    while start < length:
        end = start + data.draw(st.integers(1, min(32, length - start)))
        outputs.append(engine.launch_prefill([chunk_of(0, prompt, start, end, is_scored=True)]))
        start = end
    read = [engine.read(handle) for handle in outputs]
    dense = dense_logprobs(WEIGHTS, prompt)
    assert_rows_are(joined(read), dense[:-1], prompt[1:])
    assert read[-1].tokens[0] == np.argmax(dense[-1]), "the last row is the first output token's"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    starts=st.lists(st.sampled_from([0, 1, 4, 15, 40]), min_size=2, max_size=3),
    lengths=st.tuples(*[st.integers(1, 30)] * 3).filter(lambda lengths: sum(lengths) <= 32),
    scored=st.tuples(*[st.booleans()] * 3),
    is_last=st.booleans(),
)
def test_sequences_that_share_a_step_are_scored_one_behind_the_other(
    engine: Engine, starts: list[int], lengths: tuple[int, ...], scored: tuple[bool, ...], is_last: bool
) -> None:
    prompts = [prompt_of(start + lengths[i] + (not is_last), 10 + i) for i, start in enumerate(starts)]
    for i, start in enumerate(starts):
        for first in range(0, start, 32):
            engine.launch_prefill([chunk_of(i, prompts[i], first, min(first + 32, start), is_scored=False)])
    step = [chunk_of(i, prompts[i], start, start + lengths[i], scored[i]) for i, start in enumerate(starts)]
    output = engine.read(engine.launch_prefill(step))
    expected = [dense_logprobs(WEIGHTS, prompts[i])[seq.start : seq.start + len(seq.targets)] for i, seq in enumerate(step)]
    targets = [token for seq in step for token in seq.targets]
    if not targets:
        assert output.prompt is None
    else:
        assert output.prompt is not None
        assert_rows_are(output.prompt, np.concatenate(expected), targets)


def test_a_step_may_score_more_rows_than_a_block_holds() -> None:
    length = 2 * SCORE_BLOCK_ROWS - 20
    config = CONFIG.model_copy(update={"prefill_buckets": (128,), "num_pages": 40})
    prompt = prompt_of(length, 3)
    seq = PrefillSeq(0, prompt, 0, list(range(1, 33)), PLAIN, 0, range(length - 1), prompt[1:])
    output = (engine := make_engine(config)).read(engine.launch_prefill([seq]))
    assert output.prompt is not None
    assert_rows_are(output.prompt, dense_logprobs(WEIGHTS, prompt)[:-1], prompt[1:])


def test_a_row_reads_as_a_token_with_as_many_alternatives_as_are_asked_for() -> None:
    rows = PromptRows(np.float32([-0.5, -2.0]), np.int32([[7, 8], [9, 4]]), np.float32([[-0.5, -1.0], [-0.25, -3.0]]))
    assert len(rows) == 2
    assert rows.read(1, 12, 4, 1) == PromptToken(12, 4, -2.0, [(9, -0.25)])
    assert rows.read(0, 3, 7, 0) == PromptToken(3, 7, -0.5, [])


# ---- Whose row is whose ----


def request_of(prompt: list[int], num_top: int | None, num_prior: int = 0) -> SequenceRequest:
    sampling = Sampling(max_tokens=9, prompt_logprobs=num_top)
    return SequenceRequest(request_id="r", room=1, prompt=prompt, num_prior=num_prior, sampling=sampling, deadline_s=1e9)


def part_of(prompt: list[int], start: int, end: int, num_top: int | None = 0, num_known: int = 0) -> PrefillPart:
    request = request_of(prompt, num_top)
    seq = Computing(Answer.start(request), 0, SimpleNamespace(pages=[1, 2, 3]), 0, 0, rows_wanted(request, num_known))
    return PrefillPart(seq, start, end)


@pytest.mark.parametrize(
    ("num_top", "num_prior", "num_known", "rows"),
    [(None, 0, 0, []), (0, 0, 0, [0, 1, 2, 3]), (5, 0, 2, [2, 3]), (0, 0, 4, []), (0, 2, 0, [0, 1]), (0, 2, 9, [])],
)
def test_a_prompt_of_five_has_four_rows_less_what_is_known_and_what_is_output(num_top, num_prior, num_known, rows):
    assert list(rows_wanted(request_of([1, 2, 3, 4, 5], num_top, num_prior), num_known)) == rows


@pytest.mark.parametrize(("rows", "tokens"), [(range(0), 9), (range(0, 9), 0), (range(6, 9), 6), (range(9, 9), 9)])
def test_only_tokens_without_wanted_rows_may_come_from_a_cache(rows, tokens):
    assert max_cached_tokens(rows, 10) == tokens


def test_a_chunk_asks_the_engine_about_the_tokens_behind_its_rows():
    whole = prefill_seq(part_of([10, 11, 12, 13, 14], 0, 5))
    assert (whole.scored, whole.targets) == (range(0, 4), [11, 12, 13, 14])
    first = prefill_seq(part_of([10, 11, 12, 13, 14], 0, 2))
    assert (first.scored, first.targets) == (range(0, 2), [11, 12]), "the last row is scored against the next chunk's first token"
    rest = prefill_seq(part_of([10, 11, 12, 13, 14], 2, 5, num_known=3))
    assert (rest.scored, rest.targets) == (range(1, 2), [14])
    nothing = prefill_seq(part_of([10, 11, 12, 13, 14], 0, 5, num_top=None))
    assert not nothing.scored and not nothing.targets


def test_a_skipped_sequence_does_not_shift_the_rows_of_its_neighbours():
    """Row 8 of the scenarios: without the step over the skipped rows, the third sequence is told the second one's."""
    first, skipped, third = part_of([5, 6, 7], 0, 3), part_of([8, 9, 10, 11], 0, 4), part_of([20, 21, 22], 0, 3)
    cursor = LogprobCursor(FakeRows([first, skipped, third]))
    assert [token.logprob for token in cursor.take(first)] == [prompt_logprob([5, 6]), prompt_logprob([5, 6, 7])]
    assert cursor.advance_logprob_pt(skipped) == range(2, 5)
    assert [(token.position, token.token, token.logprob) for token in cursor.take(third)] == [
        (1, 21, prompt_logprob([20, 21])),
        (2, 22, prompt_logprob([20, 21, 22])),
    ]


def test_a_part_that_wants_more_rows_than_the_step_has_is_a_broken_invariant():
    part = part_of([5, 6, 7], 0, 3)
    with pytest.raises(AssertionError, match="are wanted"):
        LogprobCursor(None).take(part)
    cursor = LogprobCursor(FakeRows([part]))
    cursor.take(part)
    with pytest.raises(AssertionError, match="are wanted"):
        cursor.take(part)


def test_a_message_is_of_bounded_size_however_long_the_prompt():
    token = PromptToken(8191, 49151, -12.345678901, [(49151, -1.0000001)] * MAX_TOP_LOGPROBS)
    messages = prompt_messages([token] * 8191)
    assert [len(message.prompt) for message in messages] == [PROMPT_TOKENS_PER_MESSAGE] * 31 + [8191 - 31 * PROMPT_TOKENS_PER_MESSAGE]
    longest = rpc.encode(messages[0])
    assert len(longest) < rpc.MAX_MESSAGE_BYTES / 100
    assert rpc.decoder(Event)(longest) == messages[0]


# ---- The schedulers ----


def scoring(max_tokens: int = 4) -> Sampling:
    return Sampling(max_tokens=max_tokens, prompt_logprobs=1)


def assert_prompt_told(cluster: Cluster, name: str, prompt: list[int]) -> None:
    """Every position once, in order, with its own number."""
    told = cluster.prompts[name]
    assert [(token.position, token.token) for token in told] == list(enumerate(prompt))[1:]
    assert [token.logprob for token in told] == [prompt_logprob(prompt[: i + 1]) for i in range(1, len(prompt))]
    assert all(len(token.top_logprobs) == 1 for token in told)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 45])
def test_a_prompt_is_told_once_in_order_whoever_computes_it(local, length):
    cluster, prompt = Cluster(), prompt_of(length, length, 900)
    remote = Sampling(max_tokens=4)
    request = cluster.request("a", prompt, sampling=scoring(), local=local)
    cluster.tokens["a"] = {}
    if local:
        cluster.decode.submit(request)
    else:  # as the router does it: decode is not asked
        cluster.link._room(request.room)
        cluster.prefill.submit(request)
        cluster.decode.submit(cluster.request("a", prompt, sampling=remote, room=request.room))
    cluster.run()
    assert_prompt_told(cluster, "a", prompt)
    assert cluster.answer("a") == expected_answer(prompt, 4)
    cluster.assert_nothing_held()


def submit(cluster: Cluster, name: str, prompt: list[int], is_scored: bool = True, delay: int = 0) -> SequenceRequest:
    request = cluster.request(name, prompt, sampling=scoring() if is_scored else Sampling(max_tokens=4))
    cluster.tokens.setdefault(name, {})
    cluster.link._room(request.room)
    cluster.prefill.submit(request)
    cluster.late.append((cluster.now + delay, cluster.request(name, prompt, 4, room=request.room)))
    return request


def test_a_scored_prompt_uses_no_cached_prefix_and_is_cached_itself():
    cluster, prompt = Cluster(), prompt_of(40, 1, 900)
    submit(cluster, "cold", prompt, is_scored=False)
    cluster.run()
    submit(cluster, "scored", prompt)
    cluster.run()
    assert_prompt_told(cluster, "scored", prompt)
    assert cluster.ends["scored", "prefill"].cached_tokens == 0
    for name in ("local", "local again"):
        cluster.submit(cluster.request(name, prompt, sampling=scoring(), local=True))
        cluster.run()
        assert_prompt_told(cluster, name, prompt)
    other = prompt_of(40, 2, 900)
    submit(cluster, "first", other)
    cluster.run()
    submit(cluster, "warm", other, is_scored=False)
    cluster.run()
    assert cluster.ends["warm", "prefill"].cached_tokens == 36
    assert not cluster.prompts["warm"]
    cluster.assert_nothing_held()


@pytest.mark.parametrize("drop_on_miss", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5, 8, 30])
def test_a_retry_loses_no_row_and_computes_none_again(drop_on_miss, delay):
    cluster, prompt = Cluster(retries=2, drop_on_miss=drop_on_miss), prompt_of(45, 3, 900)
    submit(cluster, "a", prompt, delay=delay)
    for _ in range(delay):
        cluster.tick()
        assert not cluster.prompts.get("a"), "nothing is told before bootstrap has ended"
    cluster.run()
    assert_prompt_told(cluster, "a", prompt)
    assert cluster.num_scored["a"] == 44
    assert cluster.prefill_engine.num_computed_tokens <= 45 + 2 * 4, "a retry finds the prompt in the cache"
    cluster.assert_nothing_held()


def test_a_forced_retry_in_a_shared_step_leaves_its_neighbours_rows_alone():
    faults = FaultHooks(force_retry=lambda request_id: request_id == "b")
    cluster = Cluster(retries=1, faults=faults, step_tokens=64)
    prompts = {name: prompt_of(9 + i, i, 900) for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        submit(cluster, name, prompt)
    cluster.run()
    assert cluster.num_forwards["b"] == 2
    for name, prompt in prompts.items():
        assert_prompt_told(cluster, name, prompt)
    cluster.assert_nothing_held()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("step_tokens", [16, 64])
@pytest.mark.parametrize("after", range(1, 8))
def test_an_abort_in_a_shared_step_leaves_its_neighbours_rows_alone(local, step_tokens, after):
    cluster = Cluster(step_tokens=step_tokens)
    prompts = {name: prompt_of(length, i, 900) for i, (name, length) in enumerate({"a": 7, "gone": 22, "b": 9, "c": 30}.items())}
    for name, prompt in prompts.items():
        if local:
            cluster.submit(cluster.request(name, prompt, sampling=scoring(), local=True))
        else:
            submit(cluster, name, prompt)
    for _ in range(after):
        cluster.tick()
    cluster.prefill.abort("gone")
    cluster.decode.abort("gone")
    cluster.run()
    for name in "abc":
        assert_prompt_told(cluster, name, prompts[name])
        assert cluster.answer(name) == expected_answer(prompts[name], 4)
    cluster.assert_nothing_held()


@pytest.mark.parametrize("seed", range(12))
def test_prompts_are_told_once_though_their_sequences_are_retracted(seed):
    rng = random.Random(seed)
    cluster = Cluster(decode_pages=15, reserve=1, step_tokens=rng.choice([4, 8, 16]))
    prompts = {f"r{i}": prompt_of(rng.randint(2, 14), 10 * seed + i, 900) for i in range(5)}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, sampling=scoring(30), local=True))
    cluster.run()
    assert cluster.decode.num_retractions > 0
    for name, prompt in prompts.items():
        assert_prompt_told(cluster, name, prompt)
        assert cluster.answer(name) == expected_answer(prompt, 30)
    cluster.assert_nothing_held()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_retried_and_fails_the_prompts_that_end_well_are_told_rightly(seed):
    rng = random.Random(seed)
    faults = FaultHooks(force_retry=lambda request_id: rng.random() < 0.3, fail_poll=lambda: rng.random() < 0.01)
    cluster = Cluster(retries=2, faults=faults, metadata=4, seed=seed, max_delay=2, drop_on_miss=seed % 2 == 0, step_tokens=16)
    prompts = {f"r{i}": prompt_of(rng.randint(1, 40), 100 * seed + i, 900) for i in range(10)}
    scored = {name for name in prompts if rng.random() < 0.7}
    for name, prompt in prompts.items():
        submit(cluster, name, prompt, name in scored, rng.randint(0, 12))
    cluster.run()
    ended = [name for name in prompts if isinstance(cluster.ends.get((name, "prefill")), Finished)]
    for name in ended:
        if name in scored:
            assert_prompt_told(cluster, name, prompts[name])
        else:
            assert not cluster.prompts[name]
    assert len(ended) > 2
