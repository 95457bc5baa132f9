"""The engine against a dense float64 oracle: chunks, ragged steps, decode, moving pages, and what compilation and donation promise."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.engine.batch import DecodeSeq, PrefillSeq, StepOutput
from pdjax.engine.compilation import DECODE_WORKER, PREFILL_WORKER, CompileCounter
from pdjax.engine.engine import Engine
from pdjax.protocol import Sampling
from tests.engine_kit import (
    CONFIG,
    SHAPE,
    dense_logprobs,
    generate,
    greedy_with_logprobs,
    make_engine,
    poison_pool,
    prefill_chunks,
    random_weights,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WEIGHTS = random_weights()
TABLE = SHAPE.max_context_tokens // CONFIG.page_size
LOGPROB_TOLERANCE = 2e-4
"""float32 against float64 through two layers with activations of order 10."""

greedy = greedy_with_logprobs()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Warm, and with NaN wherever nobody has written yet."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        made = make_engine()
        made.warm_up(lambda done, total, name: None)
        poison_pool(made)
        yield made
        assert made.compilations_after_warm_up() == 0


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, length).tolist()


def pages_of(index: int) -> list[int]:
    """A page table of its own for each of four sequences, in no order."""
    return (np.random.default_rng(index).permutation(TABLE) + 1 + index * TABLE).tolist()


def assert_row_is(output: StepOutput, row: int, expected: np.ndarray) -> None:
    """The row's token and log probabilities are those of a dense row of log probabilities, float64[vocab]."""
    best = np.argsort(-expected)[:20]
    np.testing.assert_allclose(output.top_logprobs[row], expected[best], atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(expected[output.top_ids[row]], expected[best], atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(output.logprobs[row], expected[output.tokens[row]], atol=LOGPROB_TOLERANCE)
    assert output.tokens[row] == output.top_ids[row][0]


lengths_around_borders = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(length=lengths_around_borders, data=st.data())
def test_a_prompt_in_any_chunks_gives_the_dense_distribution(engine: Engine, length: int, data: st.DataObject) -> None:
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(data.draw(st.integers(1, min(32, length - sum(chunks)))))
    prompt = prompt_of(length, length)
    output = prefill_chunks(engine, 0, prompt, pages_of(0), chunks, greedy)
    assert_row_is(output, 0, dense_logprobs(WEIGHTS, prompt)[-1])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    starts=st.lists(lengths_around_borders, min_size=1, max_size=3),
    lengths=st.tuples(*[st.integers(1, 30)] * 3).filter(lambda lengths: sum(lengths) <= 32),
    sampled=st.tuples(*[st.booleans()] * 3),
)
def test_sequences_that_share_a_step_do_not_disturb_each_other(
    engine: Engine, starts: list[int], lengths: tuple[int, ...], sampled: tuple[bool, ...]
) -> None:
    prompts = [prompt_of(100 + i, start + lengths[i]) for i, start in enumerate(starts)]
    for i, start in enumerate(starts):
        for first in range(0, start, 32):
            tokens = prompts[i][first : min(first + 32, start)]
            engine.launch_prefill([PrefillSeq(i, tokens, first, pages_of(i), greedy, None)])
    step = [PrefillSeq(i, prompts[i][start:], start, pages_of(i), greedy, 0 if sampled[i] else None) for i, start in enumerate(starts)]
    output = engine.read(engine.launch_prefill(step))
    for i, prompt in enumerate(prompts):
        if sampled[i]:
            assert_row_is(output, i, dense_logprobs(WEIGHTS, prompt)[-1])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(lengths_around_borders, min_size=1, max_size=4))
def test_decode_continues_what_prefill_began(engine: Engine, lengths: list[int]) -> None:
    sequences = [prompt_of(200 + i, length) for i, length in enumerate(lengths)]
    for i, prompt in enumerate(sequences):
        chunks = [min(32, len(prompt) - start) for start in range(0, len(prompt), 32)]
        sequences[i] = prompt + prefill_chunks(engine, i, prompt, pages_of(i), chunks, greedy).tokens.tolist()
    for step in range(6):
        batch = [DecodeSeq(i, None, len(seq) - 1, pages_of(i), greedy, step + 1) for i, seq in enumerate(sequences)]
        output = engine.read(engine.launch_decode(batch))
        for i, seq in enumerate(sequences):
            assert_row_is(output, i, dense_logprobs(WEIGHTS, seq)[-1])
            seq.append(int(output.tokens[i]))


def test_tied_embeddings_serve_both_ends() -> None:
    shape = SHAPE._replace(tied_embeddings=True)
    prompt = prompt_of(8, 7)
    output = prefill_chunks(make_engine(shape=shape), 0, prompt, pages_of(0), [7], greedy)
    assert_row_is(output, 0, dense_logprobs(random_weights(shape), prompt, shape)[-1])


def test_a_given_token_takes_the_place_of_the_sampled_one(engine: Engine) -> None:
    prompt = prompt_of(1, 10)
    prefill_chunks(engine, 0, prompt, pages_of(0), [10], greedy)
    output = engine.read(engine.launch_decode([DecodeSeq(0, 17, 10, pages_of(0), greedy, 1)]))
    assert_row_is(output, 0, dense_logprobs(WEIGHTS, [*prompt, 17])[-1])


def test_steps_launched_ahead_give_what_steps_read_one_by_one_give(engine: Engine) -> None:
    prompt, plain = prompt_of(2, 13), Sampling(max_tokens=100, temperature=0.0)
    tokens = generate(engine, 0, prompt, pages_of(0), 40, plain)
    expected, sequence = [], list(prompt)
    for _ in range(40):
        expected.append(int(np.argmax(dense_logprobs(WEIGHTS, sequence)[-1])))
        sequence.append(expected[-1])
    assert tokens == expected
    assert len(set(tokens)) > 5, f"an answer too dull to tell anything: {tokens}"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_does_not_depend_on_the_batch_or_the_slot(engine: Engine, temperature: float) -> None:
    wanted = Sampling(max_tokens=100, temperature=temperature, top_p=0.95, seed=2**62 + 12345)
    other = Sampling(max_tokens=100, temperature=1.5, seed=7)
    prompt, pages = prompt_of(3, 9), pages_of(0)
    alone = generate(engine, 0, prompt, pages, 12, wanted)
    for batch_size in range(2, 17):
        slot = batch_size - 1
        answer = [int(prefill_chunks(engine, slot, prompt, pages, [4, 5], wanted).tokens[0])]
        for step in range(11):
            batch = [DecodeSeq(i, 5, 3, pages_of(1), other, step) for i in range(batch_size - 1)]
            batch.insert(step % batch_size, DecodeSeq(slot, None, len(prompt) + step, pages, wanted, step + 1))
            answer.append(int(engine.read(engine.launch_decode(batch)).tokens[step % batch_size]))
        assert answer == alone, f"with {batch_size - 1} others"


def test_seeds_that_differ_in_their_upper_half_give_different_answers(engine: Engine) -> None:
    answers = {
        tuple(generate(engine, 0, prompt_of(4, 6), pages_of(0), 12, Sampling(max_tokens=100, temperature=1.5, seed=seed)))
        for seed in (1, 1 + (1 << 32), 1 + (1 << 62), 2)
    }
    assert len(answers) == 4


def test_pages_moved_to_another_engine_continue_the_same_answer(engine: Engine) -> None:
    prompt, sampling = prompt_of(5, 27), Sampling(max_tokens=100, temperature=0.9, seed=11)
    whole = generate(engine, 0, prompt, pages_of(0), 12, sampling)
    prefill_chunks(engine, 1, prompt, pages_of(1), [27], sampling)
    decode = make_engine()
    poison_pool(decode)
    target = [9, 3, 8, 1, 20, 33, 7, 40, 41, 42]
    for first, count in ((0, 4), (4, 3)):
        chunk = engine.gather(pages_of(1)[first : first + count])
        assert chunk.shape == (4, SHAPE.num_layers, CONFIG.page_size, 2, SHAPE.head_dim)
        on_its_way = np.array(chunk)[:count]
        decode.install(target[first : first + count], decode.put(on_its_way))
    tokens, handles = whole[:1], []
    for step in range(11):
        token = whole[0] if step == 0 else None
        handles.append(decode.launch_decode([DecodeSeq(2, token, len(prompt) + step, target, sampling, step + 1)]))
    assert tokens + [int(decode.read(handle).tokens[0]) for handle in handles] == whole


def test_a_gather_sees_the_pool_as_it_was_when_launched(engine: Engine) -> None:
    prompt, pages = prompt_of(6, 8), [3, 1]
    prefill_chunks(engine, 0, prompt, pages, [8], greedy)
    before = engine.gather(pages)
    prefill_chunks(engine, 0, prompt_of(7, 8), pages, [8], greedy)
    after = engine.gather(pages)
    prefill_chunks(engine, 0, prompt, pages, [8], greedy)
    np.testing.assert_array_equal(np.array(before)[:2], np.array(engine.gather(pages))[:2])
    assert not np.array_equal(np.array(before)[:2], np.array(after)[:2])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 9])
def test_chunks_of_any_number_of_rows_can_be_installed(engine: Engine, rows: int) -> None:
    shape = (rows, SHAPE.num_layers, CONFIG.page_size, 2, SHAPE.head_dim)
    kv = np.random.default_rng(rows).normal(size=shape).astype(np.float32)
    pages = list(range(20, 20 + rows))
    for array in (kv, engine.put(kv), jnp.asarray(kv[: max(1, rows - 1)])):
        count = min(rows, len(array))
        engine.install(pages[:count], array)
        for first in range(0, count, 4):
            part = pages[first : min(first + 4, count)]
            np.testing.assert_array_equal(np.array(engine.gather(part))[: len(part)], kv[first : first + len(part)])


def test_an_install_leaves_every_other_page_alone(engine: Engine) -> None:
    engine.install([1, 2, 3, 4], np.ones((4, SHAPE.num_layers, CONFIG.page_size, 2, SHAPE.head_dim), np.float32))
    engine.install([2], np.full((4, SHAPE.num_layers, CONFIG.page_size, 2, SHAPE.head_dim), 5, np.float32))
    means = np.array(engine.gather([1, 2, 3, 4])).mean(axis=(1, 2, 3, 4))
    np.testing.assert_array_equal(means, [1, 5, 1, 1])


def test_steps_update_the_pool_in_place(engine: Engine) -> None:
    pool_bytes = CONFIG.num_pages * CONFIG.page_size * SHAPE.kv_bytes_per_token(4)
    for key, program in engine.compiled_programs().items():
        if key.name in ("prefill", "decode", "install"):
            memory = program.memory_analysis()
            assert memory.alias_size_in_bytes >= pool_bytes, f"{key} does not take the pool over"
            needed = memory.temp_size_in_bytes
            assert needed < pool_bytes / 2, f"{key} needs {needed} bytes beside a pool of {pool_bytes}"


def test_a_role_compiles_its_own_programs_only() -> None:
    names: list[str] = []
    buckets = {"prefill_buckets": (4,), "decode_buckets": (16,), "transfer_buckets": (1,)}
    small = CONFIG.model_copy(update={"num_pages": 12, "max_prefill_seqs": 1, **buckets})
    prefill = make_engine(small)
    prefill.warm_up(lambda done, total, name: names.append(name), PREFILL_WORKER)
    steps = {"prefill_begin[4]", "prefill_layers[4]", "prefill_end[4]", "score[4]"}
    assert set(names) == {"history[512]", *steps, "greedy[1]", "sample[1]", "sample_logprobs[1]", "gather[1]", ""}
    assert prefill.compilations_after_warm_up() == 0
    prefill.install([1], np.zeros((1, SHAPE.num_layers, CONFIG.page_size, 2, SHAPE.head_dim), np.float32))
    assert prefill.compilations_after_warm_up() == 1
    assert DECODE_WORKER & PREFILL_WORKER == PREFILL_WORKER


def test_compilations_are_counted_for_whom_they_happen() -> None:
    mine, other = CompileCounter(), CompileCounter()
    double = jax.jit(lambda x: x + x)
    with mine.attributed():
        with other.attributed():
            double(np.zeros(3, np.float32))
        double(np.zeros(3, np.float32))
        assert (mine.count, other.count) == (0, 1)
        double(np.zeros(4, np.float32))
    double(np.zeros(5, np.float32))
    assert (mine.count, other.count) == (1, 1)


def test_weights_that_do_not_fit_are_named() -> None:
    weights = random_weights()
    weights["layers/down"] = weights["layers/down"][:, :, :-1]
    with pytest.raises(ValueError, match=r"layers/down is float32\[2, 24, 31\], the model needs float32\[2, 24, 32\]"):
        Engine(SHAPE, weights, CONFIG)


def test_impossible_steps_are_broken_invariants(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="5 tokens do not fit into 1 pages"):
        engine.launch_prefill([PrefillSeq(0, [1] * 5, 0, [1], greedy, None)])
    with pytest.raises(AssertionError, match=r"slot 16 outside 0\.\.15"):
        engine.launch_decode([DecodeSeq(16, None, 1, [1], greedy, 1)])
    with pytest.raises(AssertionError, match="33 is outside the buckets"):
        engine.launch_prefill([PrefillSeq(0, [1] * 33, 0, pages_of(0), greedy, None)])
