"""Prefill and decode scheduler together, over an engine whose answers can be computed by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.protocol import Failed, Finished, KVPoll, Sampling
from tests.scheduler_harness import Cluster, expected_answer, next_token

PAGE = 4


def prompt_of(length, seed=0):
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(900) for _ in range(length)]


def test_the_hand_made_oracle_counts_as_it_says():
    assert next_token([]) == 1
    assert next_token([5]) == 43  # 1 * 31 + 5 + 7
    assert next_token([5, 2]) == (43 * 31 + 9) % 997
    assert expected_answer([5], 2) == [43, next_token([5, 43])]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("step_tokens", [4, 5, 16])
@pytest.mark.parametrize("local", [False, True])
def test_every_prompt_length_is_answered_as_computed_by_hand(length, step_tokens, local):
    cluster = Cluster(step_tokens=step_tokens)
    prompt = prompt_of(length)
    cluster.submit(cluster.request("a", prompt, 9, local=local))
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 9)
    cluster.assert_nothing_held()


def test_a_second_run_of_a_prompt_moves_only_the_pages_that_decode_lacks():
    cluster = Cluster()
    prompt = prompt_of(22)
    sent = []
    for name in ("a", "b"):
        request = cluster.request(name, prompt, 3)
        cluster.submit(request)
        cluster.run()
        sent.append(cluster.link.rooms[request.room].num_sent_pages)
        assert cluster.answer(name) == expected_answer(prompt, 3)
    assert sent == [6, 1]
    assert cluster.ends["b", "prefill"].cached_tokens == 20
    assert cluster.ends["b", "decode"].cached_tokens == 20


@pytest.mark.parametrize("warm", ["prefill", "decode", "both"])
def test_caches_warm_on_either_side_change_nothing_but_the_work(warm):
    cluster = Cluster()
    prompt = prompt_of(40)
    cluster.submit(cluster.request("warm", prompt[:30], 2))
    cluster.run()
    if warm == "prefill":
        cluster.decode.memory.cache.reset()
    if warm == "decode":
        cluster.prefill.memory.cache.reset()
    before = cluster.prefill_engine.num_computed_tokens
    request = cluster.request("a", prompt, 6)
    cluster.submit(request)
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 6)
    assert cluster.prefill_engine.num_computed_tokens - before == (40 if warm == "decode" else 12)
    assert cluster.link.rooms[request.room].num_sent_pages == (10 if warm == "prefill" else 3)
    cluster.assert_nothing_held()


def test_cached_tokens_never_exceed_the_prompt_less_its_last_token():
    cluster = Cluster()
    prompt = prompt_of(16)
    for name in ("a", "b"):
        cluster.submit(cluster.request(name, prompt, 2))
        cluster.run()
    assert cluster.ends["b", "prefill"].cached_tokens == 12
    assert cluster.answer("b") == expected_answer(prompt, 2)


def test_a_prompt_that_ends_at_a_page_border_and_lies_on_decode_whole_sends_no_page():
    cluster = Cluster()
    prompt = prompt_of(16)
    cluster.submit(cluster.request("a", prompt, 2))
    cluster.run()
    request = cluster.request("b", prompt, 2)
    cluster.submit(request)
    cluster.run()
    assert cluster.link.rooms[request.room].num_sent_pages == 0
    assert cluster.answer("b") == expected_answer(prompt, 2)


def test_with_one_metadata_slot_each_of_many_requests_gets_its_own_first_token():
    cluster = Cluster(metadata=1)
    prompts = {f"r{i}": prompt_of(3 + i, i) for i in range(12)}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, 4))
    cluster.run()
    for name, prompt in prompts.items():
        assert cluster.answer(name) == expected_answer(prompt, 4)
    cluster.assert_nothing_held()


@pytest.mark.parametrize("local", [False, True])
def test_an_answer_that_ends_with_its_first_token_never_runs_on_decode(local):
    cluster = Cluster()
    prompt = prompt_of(10)
    first = next_token(prompt)
    cluster.submit(cluster.request("stop", prompt, 8, stop=(first,), local=local))
    cluster.submit(cluster.request("one", prompt, 1, local=local))
    cluster.run()
    assert cluster.answer("stop") == cluster.answer("one") == [first]
    side = "decode" if local else "prefill"
    assert cluster.ends["stop", side] == Finished(reason="stop", stop_token=first, cached_tokens=0)
    assert cluster.ends["one", side].reason == "length"
    if not local:
        assert cluster.ends["stop", "decode"].kind in ("aborted", "transfer")
    cluster.assert_nothing_held()


def test_an_answer_stops_at_its_stop_token_however_many_steps_are_in_flight():
    cluster = Cluster()
    prompt = prompt_of(9)
    answer = expected_answer(prompt, 20)
    cluster.submit(cluster.request("a", prompt, 20, stop=(answer[6],)))
    cluster.run()
    assert cluster.answer("a") == answer[: answer.index(answer[6]) + 1]
    assert cluster.ends["a", "decode"].reason == "stop"


def test_a_stop_token_before_min_tokens_does_not_end_the_answer():
    cluster = Cluster()
    prompt = prompt_of(9)
    answer = expected_answer(prompt, 10)
    sampling = Sampling(max_tokens=10, min_tokens=5, stop_token_ids=(answer[2],))
    cluster.submit(cluster.request("a", prompt, sampling=sampling))
    cluster.run()
    assert len(cluster.answer("a")) >= 5


def test_tokens_of_an_earlier_attempt_count_toward_index_and_max_tokens():
    cluster = Cluster()
    prompt = prompt_of(9)
    answer = expected_answer(prompt, 10)
    cluster.tokens["a"] = dict(enumerate(answer[:4]))
    cluster.submit(cluster.request("a", prompt + answer[:4], 10, num_prior=4))
    cluster.run()
    assert cluster.answer("a") == answer
    assert cluster.ends["a", "decode"].reason == "length"


def test_under_page_pressure_sequences_are_retracted_and_end_with_the_same_answer():
    cluster = Cluster(decode_pages=20, slots=6)
    prompts = {f"r{i}": prompt_of(8 + i, i) for i in range(6)}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, 40))
    cluster.run(5000)
    assert cluster.decode.num_retractions > 0
    for name, prompt in prompts.items():
        assert cluster.answer(name) == expected_answer(prompt, 40)
    cluster.assert_nothing_held()


def test_a_retracted_sequence_is_not_fetched_twice():
    cluster = Cluster(decode_pages=20, slots=6)
    requests = [cluster.request(f"r{i}", prompt_of(8 + i, i), 40, room=i + 1) for i in range(6)]
    for request in requests:
        cluster.submit(request)
    cluster.run(5000)
    for request in requests:
        assert cluster.link.rooms[request.room].num_sent_pages <= -(-len(request.prompt) // PAGE)


@pytest.mark.parametrize("old_leaves", [False, True])
@pytest.mark.parametrize("length", [7, 13])
def test_a_sequence_that_is_retracted_while_its_last_chunk_is_in_flight_gets_the_same_answer(length, old_leaves):
    """The result of that chunk comes when the sequence waits or, where the older one leaves, is computed again: it is dropped."""
    prompts = {"old": prompt_of(9, 1), "young": prompt_of(length, 2)}
    num_hits = 0
    for arrival in range(10, 45):
        cluster = Cluster(page_size=1, decode_pages=46, step_tokens=2, slots=2, reserve=1)
        cluster.d.depth = 4
        cluster.submit(cluster.request("old", prompts["old"], 34, local=True))
        for _ in range(arrival):
            cluster.tick()
        cluster.submit(cluster.request("young", prompts["young"], 12, local=True))
        num_retractions = 0
        while ("young", "decode") not in cluster.ends:
            cluster.tick()
            if cluster.decode.num_retractions > num_retractions and _last_chunk_is_in_flight(cluster, "young"):
                num_hits += 1
                if old_leaves:
                    cluster.decode.abort("old")
            num_retractions = cluster.decode.num_retractions
        cluster.run()
        assert cluster.answer("young") == expected_answer(prompts["young"], 12)
        answer = cluster.answer("old")
        assert answer == expected_answer(prompts["old"], 34)[: len(answer) if old_leaves else None]
        cluster.assert_nothing_held()
    assert num_hits, "no retraction met a last chunk in flight"


def _last_chunk_is_in_flight(cluster, name):
    chunks = [part for kind, parts, _ in cluster.d.in_flight if kind == "prefill" for part in parts]
    return any(part.is_last and part.seq.answer.request_id == name for part in chunks)


def test_a_sequence_larger_than_the_pool_is_rejected_with_both_numbers():
    cluster = Cluster(decode_pages=8, prefill_pages=64)
    cluster.submit(cluster.request("a", prompt_of(10), 100, local=True))
    cluster.run()
    event = cluster.ends["a", "decode"]
    assert event.kind == "rejected" and not event.retriable
    assert "109" in event.message and "28" in event.message
    cluster.assert_nothing_held()


def test_a_sequence_that_fills_the_pool_to_the_last_page_is_served():
    cluster = Cluster(decode_pages=8)
    prompt = prompt_of(9)
    cluster.submit(cluster.request("a", prompt, 20, local=True))  # 29 tokens; the last one is never an input
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 20)


def test_a_failed_request_behind_a_starved_one_is_cleaned_up_in_the_same_pass():
    cluster = Cluster(metadata=1)
    holder, starved, failing = (cluster.request(name, prompt_of(4), 3, room=i) for i, name in enumerate(("h", "s", "f")))
    for request in (holder, starved, failing):
        cluster.prefill.submit(request)
    cluster.link.open(0, None, 0)
    cluster.link.open(1, None, 0)
    cluster.link.rooms[2].fail_both("damaged on purpose")
    ready, failed = cluster.prefill.bootstrap.pop_bootstrapped()
    assert [entry.request.request_id for entry in ready] == ["h"]
    assert [entry.request.request_id for entry in failed] == ["f"]
    assert "s" in cluster.prefill.bootstrap


def test_a_burst_far_above_capacity_is_served_without_a_time_out():
    cluster = Cluster(slots=4, metadata=4)
    prompts = {f"r{i}": prompt_of(5 + i % 7, i) for i in range(32)}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, 6))
    cluster.run()
    for name, prompt in prompts.items():
        assert cluster.answer(name) == expected_answer(prompt, 6)
        assert isinstance(cluster.ends[name, "decode"], Finished)


def test_a_full_queue_refuses_and_says_so():
    cluster = Cluster()
    cluster.decode.limits = cluster.decode.limits._replace(max_queue=2)
    for i in range(4):
        cluster.decode.submit(cluster.request(f"r{i}", prompt_of(4), local=True))
    outcomes = dict(cluster.decode.take_outcomes())
    assert set(outcomes) == {"r2", "r3"}
    assert all(event.kind == "over_capacity" and event.retriable for event in outcomes.values())


def test_a_passed_deadline_ends_a_request_in_every_place():
    cluster = Cluster(slots=2, metadata=2)
    for i in range(6):
        cluster.submit(cluster.request(f"r{i}", prompt_of(20, i), 200, deadline_s=12.0))
    cluster.run()
    assert {event.kind for event in cluster.ends.values() if isinstance(event, Failed)} <= {"deadline", "transfer", "bootstrap"}
    assert len(cluster.ends) == 12
    cluster.assert_nothing_held()


@pytest.mark.parametrize("abort_after", range(0, 16))
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_an_abort_at_any_moment_frees_everything_and_disturbs_nobody(abort_after, side):
    cluster = Cluster(step_tokens=8, max_delay=2, seed=abort_after)
    prompts = {f"r{i}": prompt_of(14 + i, i) for i in range(4)}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, 6))
    for _ in range(abort_after):
        cluster.tick()
    if side != "decode":
        cluster.prefill.abort("r1")
    if side != "prefill":
        cluster.decode.abort("r1")
    cluster.run()
    for name, prompt in prompts.items():
        if name != "r1":
            assert cluster.answer(name) == expected_answer(prompt, 6)
    assert cluster.answer("r1") == expected_answer(prompts["r1"], 6)[: len(cluster.answer("r1"))]
    cluster.assert_nothing_held()


def test_pages_of_an_aborted_request_with_a_stalled_send_are_reused_without_harm():
    cluster = Cluster(prefill_pages=9, decode_pages=9, max_delay=0)
    stalled = cluster.request("stalled", prompt_of(30, 1), 3)
    cluster.submit(stalled)
    cluster.link.max_delay = 50
    for _ in range(6):
        cluster.tick()
    assert cluster.link.rooms[stalled.room].in_flight
    cluster.prefill.abort("stalled")
    cluster.link.max_delay = 0
    other = prompt_of(30, 2)
    cluster.submit(cluster.request("other", other, 3))
    cluster.run()
    assert cluster.answer("other") == expected_answer(other, 3)
    cluster.assert_nothing_held()


def test_a_refusal_by_prefill_releases_what_decode_had_reserved():
    cluster = Cluster()
    request = cluster.request("a", prompt_of(10), 3)
    cluster.decode.submit(request)
    cluster.tick()
    assert cluster.decode.slots.num_held == 1
    cluster.link.rooms[request.room].fail_both("prefill refused")
    cluster.tokens["a"] = {}
    cluster.run()
    assert cluster.ends["a", "decode"].kind == "transfer" and cluster.ends["a", "decode"].retriable
    cluster.assert_nothing_held()


def test_a_metadata_row_of_another_room_fails_the_request_and_gives_no_token():
    cluster = Cluster()
    request = cluster.request("a", prompt_of(10), 3)
    other = cluster.request("b", prompt_of(10), 3, room=77)
    cluster.submit(request)
    cluster.submit(other)
    for _ in range(30):
        rows = [cluster.link.rooms[room.room].row for room in (request, other)]
        if all(rows):
            break
        cluster._turn_prefill()
        if cluster.link.rooms[request.room].state == KVPoll.BOOTSTRAPPING:
            cluster._turn_decode()
        for room in (request, other):
            cluster.link.rooms[room.room].in_flight = type(cluster.link.rooms[room.room].in_flight)(
                (10**9, chunk) for _, chunk in cluster.link.rooms[room.room].in_flight
            )
    first, second = cluster.link.rooms[request.room], cluster.link.rooms[77]
    first.row, second.row = second.row, first.row
    for room in (first, second):
        room.in_flight = type(room.in_flight)((0, chunk) for _, chunk in room.in_flight)
    cluster.run()
    for name in ("a", "b"):
        event = cluster.ends[name, "decode"]
        assert event.kind == "transfer" and "room" in event.message
    cluster.assert_nothing_held()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_mix_of_requests_aborts_and_pool_sizes_gives_right_answers_and_leaves_nothing(data):
    seed = data.draw(st.integers(0, 10**6))
    rng = random.Random(seed)
    cluster = Cluster(
        page_size=rng.choice([1, 2, 4]),
        prefill_pages=rng.randint(40, 80),
        decode_pages=rng.randint(40, 80),
        slots=rng.randint(1, 6),
        metadata=rng.randint(1, 4),
        step_tokens=rng.randint(4, 20),
        window=rng.randint(1, 3),
        max_delay=rng.randint(0, 4),
        seed=seed,
        reserve=rng.randint(1, 8),
        retries=rng.choice([0, 0, 1, 3]),
        drop_on_miss=rng.random() < 0.5,
        max_held=rng.choice([0, 3, 64]),
        early_send=rng.random() < 0.5,
    )
    stems = [[rng.randrange(900) for _ in range(20)] for _ in range(3)]
    expected, aborted = {}, set()
    for i in range(rng.randint(1, 14)):
        prompt = rng.choice(stems)[: rng.randint(0, 18)] + [rng.randrange(900) for _ in range(rng.randint(1, 8))]
        count = rng.randint(1, 12)
        answer = expected_answer(prompt, count)
        stop = (rng.choice(answer),) if rng.random() < 0.3 else ()
        expected[f"r{i}"] = expected_answer(prompt, count, stop)
        cluster.submit(cluster.request(f"r{i}", prompt, count, stop=stop, local=rng.random() < 0.3, room=i), rng.choice([0, 0, 3, 20]))
        for _ in range(rng.randint(0, 5)):
            cluster.tick()
        if rng.random() < 0.2 and not cluster.late:
            victim = f"r{rng.randint(0, i)}"
            aborted.add(victim)
            for scheduler in rng.sample([cluster.prefill, cluster.decode], rng.randint(1, 2)):
                scheduler.abort(victim)
    cluster.run(4000)
    for name, answer in expected.items():
        got = cluster.answer(name)
        assert got == (answer[: len(got)] if name in aborted else answer)
    cluster.assert_nothing_held()
