"""Optimistic prefill and early send, over the engine whose answers can be computed by hand."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pdjax.config.environment import should_fail_poll, should_force_retry
from pdjax.config.load import load_config
from pdjax.protocol import Finished, KVPoll, Sampling
from pdjax.scheduler.faults import FaultHooks
from pdjax.scheduler.outbound import Held
from pdjax.simulation.arithmetic import START, extend
from pdjax.simulation.engine import PageContent
from pdjax.worker.optimism import optimistic_retries
from pdjax.worker.prefill import start_history
from tests.scheduler_harness import Cluster, expected_answer, next_token
from tests.test_schedulers import prompt_of


def ticks_to_first_token(retries, delay, prompt, **kwargs):
    cluster = Cluster(retries=retries, **kwargs)
    cluster.submit(cluster.request("a", prompt, 4), decode_delay=delay)
    for ticks in range(1, 200):
        cluster.tick()
        if 0 in cluster.tokens["a"]:
            break
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 4)
    cluster.assert_nothing_held()
    return ticks


def test_compute_hides_behind_bootstrap():
    prompt = prompt_of(48)  # three steps of 16 tokens
    prompt_ticks = ticks_to_first_token(0, 0, prompt)
    late = ticks_to_first_token(0, 10, prompt)
    optimistic = ticks_to_first_token(1, 10, prompt)
    assert late >= 10 + prompt_ticks - 1
    assert optimistic <= 12


@pytest.mark.parametrize("delay", range(0, 12))
@pytest.mark.parametrize("retries", [1, 2, 3])
@pytest.mark.parametrize("drop_on_miss", [False, True])
def test_bootstrap_may_end_at_any_moment(delay, retries, drop_on_miss):
    cluster = Cluster(retries=retries, drop_on_miss=drop_on_miss)
    prompt = prompt_of(45)
    cluster.submit(cluster.request("a", prompt, 5), decode_delay=delay)
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 5)
    assert cluster.num_forwards["a"] <= retries + 1
    assert isinstance(cluster.ends["a", "decode"], Finished)
    cluster.assert_nothing_held()


def test_a_parked_prompt_is_computed_once():
    cluster = Cluster(retries=1)
    prompt = prompt_of(45)
    cluster.submit(cluster.request("a", prompt, 5), decode_delay=30)
    for _ in range(20):
        cluster.tick()
    assert cluster.prefill.num_parked == 1
    assert not cluster.tokens["a"], "no token leaves before bootstrap has ended"
    assert cluster.prefill.memory.cache.num_pages == 0, "nothing is published before bootstrap has ended"
    cluster.run()
    assert cluster.num_forwards["a"] == 1 and cluster.prefill.counts.retries == 0


def test_a_budget_that_is_used_up_ends_in_the_bootstrap_queue():
    cluster = Cluster(retries=2, drop_on_miss=True)
    cluster.submit(cluster.request("a", prompt_of(20), 5), decode_delay=60)
    for _ in range(50):
        cluster.tick()
    assert cluster.num_forwards["a"] == 2
    assert "a" in cluster.prefill.bootstrap
    assert cluster.prefill.metadata.num_held == cluster.prefill.slots.num_held == cluster.prefill.memory.num_private == 0
    cluster.run()
    assert cluster.num_forwards["a"] == 3
    assert cluster.answer("a") == expected_answer(prompt_of(20), 5)


def test_a_retry_computes_no_more_than_the_last_page_and_counts_no_token_twice():
    cluster = Cluster(retries=1, drop_on_miss=True)
    cluster.submit(cluster.request("a", prompt_of(46), 3), decode_delay=30)
    cluster.run()
    assert cluster.num_forwards["a"] == 2
    assert cluster.prefill_engine.num_computed_tokens == 46 + 2
    assert (cluster.prefill.counts.prompt_tokens, cluster.prefill.counts.cached_tokens) == (46, 0)
    assert cluster.ends["a", "prefill"].cached_tokens == 0


def test_every_forward_of_a_prompt_tells_the_sampler_its_history_once(monkeypatch):
    """A retry may get another slot, so the history is told again though its prefix is cached now."""
    told = []
    engine = SimpleNamespace(set_history=lambda slot, prompt, output: told.append((slot, len(prompt), output)))
    cluster = Cluster(retries=1, drop_on_miss=True)
    forward = cluster.prefill_engine.prefill

    def prefill(parts):
        for part in parts:
            start_history(engine, part)
        return forward(parts)

    monkeypatch.setattr(cluster.prefill_engine, "prefill", prefill)
    sampling = Sampling(max_tokens=3, presence_penalty=0.5)
    cluster.submit(cluster.request("a", prompt_of(46), sampling=sampling), decode_delay=30)
    cluster.run()
    assert cluster.num_forwards["a"] == 2
    assert told == [(0, 46, []), (0, 46, [])]


def test_a_prefix_evicted_between_two_tries_is_computed_again():
    cluster = Cluster(retries=1, drop_on_miss=True)
    prompt = prompt_of(46)
    cluster.submit(cluster.request("a", prompt, 3), decode_delay=30)
    for _ in range(20):
        cluster.tick()
    assert cluster.prefill.memory.cache.num_pages == 11
    cluster.prefill.memory.cache.reset()
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 3)
    assert cluster.prefill_engine.num_computed_tokens == 92


@pytest.mark.parametrize("what", ["fail", "abort", "deadline"])
@pytest.mark.parametrize("after", range(1, 14))
def test_a_request_ahead_of_its_bootstrap_ends_once_and_frees_everything(what, after):
    cluster = Cluster(retries=1)
    request = cluster.request("a", prompt_of(45), 5, deadline_s=float(after) if what == "deadline" else 1e9)
    neighbour = prompt_of(30, 7)
    cluster.submit(request, decode_delay=10**6)
    cluster.submit(cluster.request("b", neighbour, 5))
    for _ in range(after):
        cluster.tick()
    if what == "fail":
        cluster.link.rooms[request.room].fail_both("the link broke")
    if what == "abort":
        cluster.prefill.abort("a")
    for _ in range(3):
        cluster.tick()
    assert ("a", "prefill") in cluster.ends, "ends within a bounded number of steps"
    cluster.late.clear()
    cluster.run()
    assert cluster.answer("b") == expected_answer(neighbour, 5)
    assert not cluster.tokens["a"]
    cluster.assert_nothing_held()


def test_parked_prompts_give_way_to_one_that_is_bootstrapped():
    cluster = Cluster(retries=1, prefill_pages=14, slots=8)
    for i in range(2):
        cluster.submit(cluster.request(f"parked{i}", prompt_of(24, i), 3), decode_delay=60)
    for _ in range(12):
        cluster.tick()
    assert cluster.prefill.num_parked == 2
    prompt = prompt_of(40, 9)
    cluster.submit(cluster.request("now", prompt, 3))
    for _ in range(15):
        cluster.tick()
    assert cluster.answer("now")[:1] == expected_answer(prompt, 1)
    cluster.run()
    for i in range(2):
        assert cluster.answer(f"parked{i}") == expected_answer(prompt_of(24, i), 3)
        assert cluster.num_forwards[f"parked{i}"] <= 2
    cluster.assert_nothing_held()


@pytest.mark.parametrize("parked_long_enough", [2, 12])
def test_metadata_slots_held_by_optimists_go_to_one_that_is_bootstrapped(parked_long_enough):
    cluster = Cluster(retries=1, metadata=2)
    for i in range(4):
        cluster.submit(cluster.request(f"early{i}", prompt_of(24, i), 3), decode_delay=80)
    for _ in range(parked_long_enough):
        cluster.tick()
    assert cluster.prefill.metadata.num_free == 0
    cluster.submit(cluster.request("now", prompt_of(20, 9), 3))
    for _ in range(20):
        cluster.tick()
    assert cluster.answer("now") == expected_answer(prompt_of(20, 9), 3)
    cluster.run()
    cluster.assert_nothing_held()


def test_an_answer_that_ends_with_its_first_token_ends_after_bootstrap_only():
    cluster = Cluster(retries=1)
    prompt = prompt_of(20)
    cluster.submit(cluster.request("a", prompt, 5, stop=(next_token(prompt),)), decode_delay=20)
    for _ in range(15):
        cluster.tick()
    assert ("a", "prefill") not in cluster.ends
    cluster.run()
    assert cluster.ends["a", "prefill"].reason == "stop"
    cluster.assert_nothing_held()


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_forced_retry_happens_once_on_the_first_try_only_and_changes_no_answer(retries):
    forced = []
    faults = FaultHooks(force_retry=lambda request_id: forced.append(request_id) or True)
    cluster = Cluster(retries=retries, faults=faults)
    prompt = prompt_of(45)
    cluster.submit(cluster.request("a", prompt, 5))
    cluster.run()
    assert cluster.num_forwards["a"] == (2 if retries else 1)
    assert len(forced) == (1 if retries else 0)
    assert cluster.answer("a") == expected_answer(prompt, 5)
    cluster.assert_nothing_held()


@pytest.mark.parametrize("seed", range(20))
def test_polls_that_fail_at_random_end_requests_cleanly_and_hurt_nobody(seed):
    rng = random.Random(seed)
    faults = FaultHooks(force_retry=lambda request_id: hash((seed, request_id)) % 10 == 0, fail_poll=lambda: rng.random() < 0.02)
    cluster = Cluster(retries=2, faults=faults, metadata=4, seed=seed, max_delay=2)
    prompts = {f"r{i}": prompt_of(10 + 3 * i, seed + i) for i in range(10)}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, 4), decode_delay=rng.randint(0, 12))
    cluster.run()
    for name, prompt in prompts.items():
        answer = expected_answer(prompt, 4)
        if isinstance(cluster.ends[name, "decode"], Finished):
            assert cluster.answer(name) == answer
        else:
            assert cluster.answer(name) == answer[: len(cluster.answer(name))]
    cluster.assert_nothing_held()


def test_the_cached_prefix_leaves_before_the_step_that_computes_the_rest():
    cluster = Cluster(step_tokens=64, window=8)
    prompt = prompt_of(40)
    cluster.submit(cluster.request("warm", prompt[:32], 2))
    cluster.run()
    cluster.decode.memory.cache.reset()
    request = cluster.request("a", prompt, 3)
    cluster.submit(request)
    cluster.prefill.advance(1e3)
    for order in cluster.decode.installs():
        raise AssertionError(order)
    cluster.decode.advance(1e3)
    cluster.prefill.advance(1e3)
    parts = cluster.prefill.next_step()
    early = list(cluster.prefill.maybe_send_cached_prefix_chunk(parts))
    assert [(order.first_page, len(order.pages)) for order in early] == [(0, 3), (3, 3), (6, 2)]
    assert cluster.prefill.counts.early_sent_pages == 8
    late = list(cluster.prefill.sends())
    assert [(order.first_page, len(order.pages)) for order in late] == [(8, 2)]


def test_nothing_is_sent_early_while_bootstrap_is_pending_or_when_decode_has_it():
    cluster = Cluster(step_tokens=64, window=8, retries=1)
    prompt = prompt_of(40)
    cluster.submit(cluster.request("warm", prompt[:32], 2))
    cluster.run()
    cluster.submit(cluster.request("pending", prompt, 3), decode_delay=30)
    cluster.prefill.advance(1e3)
    assert all(isinstance(order.sender, Held) for order in cluster.prefill.maybe_send_cached_prefix_chunk(cluster.prefill.next_step()))
    assert cluster.prefill.counts.early_sent_pages == 0
    cluster = Cluster(step_tokens=64, window=8)
    cluster.submit(cluster.request("warm", prompt[:32], 2))
    cluster.run()
    cluster.submit(cluster.request("held", prompt, 3))
    cluster.decode.advance(1e3)
    cluster.prefill.advance(1e3)
    assert list(cluster.prefill.maybe_send_cached_prefix_chunk(cluster.prefill.next_step())) == []


def test_after_a_miss_nearly_the_whole_prompt_is_sent_early():
    cluster = Cluster(retries=1, drop_on_miss=True, window=8)
    prompt = prompt_of(46)
    request = cluster.request("a", prompt, 3)
    cluster.submit(request, decode_delay=30)
    cluster.run()
    assert cluster.prefill.counts.early_sent_pages == 11
    assert cluster.link.rooms[request.room].num_sent_pages == 12
    assert cluster.answer("a") == expected_answer(prompt, 3)


def test_a_gather_dispatched_after_the_step_that_reuses_its_pages_is_caught():
    """The order in which the prefill role launches things is what keeps early sends right; break it and the oracle sees it."""
    cluster = Cluster(step_tokens=64, window=8, prefill_pages=12)
    prompt = prompt_of(36)
    cluster.submit(cluster.request("warm", prompt[:32], 2))
    cluster.run()
    cluster.decode.memory.cache.reset()
    cluster.submit(cluster.request("a", prompt, 3))
    cluster.decode.advance(1e3)
    cluster.prefill.advance(1e3)
    parts = cluster.prefill.next_step()
    orders = list(cluster.prefill.maybe_send_cached_prefix_chunk(parts))
    chains = [extend(START, prompt[:length]) for length in range(33)]
    expected = [PageContent(chains[start], tuple(chains[start + 1 : start + 5])) for start in range(0, 32, 4)]
    assert [page for order in orders for page in cluster.prefill_engine.gather(order.pages).pages] == expected
    cluster.prefill.abort("a")
    cluster.link.now += 1
    other = prompt_of(44, 5)
    cluster.submit(cluster.request("other", other, 2))
    cluster.decode.advance(1e3)
    cluster.prefill.advance(1e3)
    cluster.prefill_engine.prefill(cluster.prefill.next_step())
    assert [page for order in orders for page in cluster.prefill_engine.gather(order.pages).pages] != expected


def test_states_of_a_sender_never_let_a_send_precede_bootstrap():
    cluster = Cluster(retries=3)
    request = cluster.request("a", prompt_of(45), 5)
    cluster.submit(request, decode_delay=25)
    for _ in range(24):
        cluster.tick()
        room = cluster.link.rooms[request.room]
        assert room.state == KVPoll.BOOTSTRAPPING and room.num_sent_pages == 0
    cluster.run()


@pytest.mark.parametrize(("delay", "goes_ahead"), [(0, False), (2, False), (10, True)])
def test_a_prompt_waits_a_moment_for_its_bootstrap_before_it_goes_ahead(delay, goes_ahead):
    cluster = Cluster(retries=1, grace=4.0)
    prompt = prompt_of(20)
    cluster.submit(cluster.request("a", prompt, 3), decode_delay=delay)
    was_ahead = False
    for _ in range(9):
        cluster.tick()
        was_ahead |= cluster.prefill.num_running > 0 and cluster.link.rooms[1000].state == KVPoll.BOOTSTRAPPING
    assert was_ahead == goes_ahead
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 3)


def test_the_end_of_the_moment_is_a_deadline_of_the_loop():
    cluster = Cluster(retries=1, grace=4.0)
    cluster.submit(cluster.request("a", prompt_of(20), 3, deadline_s=500.0), decode_delay=50)
    cluster.tick()
    assert cluster.prefill.next_deadline_s() == 5.0
    for _ in range(6):
        cluster.tick()
    assert cluster.prefill.next_deadline_s() == 500.0


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["transfer.kind=loopback"], "loopback"),
        (["scheduler.prefix_cache=false", "scheduler.on_miss=retry"], "prefix_cache"),
        (["scheduler.metadata_slots=1"], "1 metadata slot"),
    ],
)
def test_combinations_that_make_no_sense_switch_it_off_with_a_warning_that_names_the_reason(settings, word, caplog):
    config = load_config(None, ["scheduler.optimistic_prefill_retries=2", *settings])
    assert optimistic_retries(config) == 0
    assert word in caplog.text and "optimistic prefill is switched off" in caplog.text


@pytest.mark.parametrize("settings", [[], ["scheduler.prefix_cache=false"], ["scheduler.on_miss=retry"], ["transfer.kind=device_put"]])
def test_all_other_combinations_keep_it_on(settings, caplog):
    assert optimistic_retries(load_config(None, ["scheduler.optimistic_prefill_retries=2", *settings])) == 2
    assert not caplog.text


@pytest.mark.parametrize(("value", "share"), [("0", 0.0), ("0.1", 0.1), ("1", 1.0)])
def test_the_hook_for_forced_retries_takes_a_fixed_share_of_requests_by_name(monkeypatch, value, share):
    monkeypatch.setenv("PDJAX_TEST_FORCE_RETRY_PROB", value)
    forced = [should_force_retry(f"request-{i}") for i in range(4000)]
    assert abs(sum(forced) / 4000 - share) < 0.02
    assert forced == [should_force_retry(f"request-{i}") for i in range(4000)]


@pytest.mark.parametrize("name", ["PDJAX_TEST_FORCE_RETRY_PROB", "PDJAX_TEST_FAILURE_PROB"])
def test_a_probability_that_is_none_is_an_error_naming_variable_and_value(monkeypatch, name):
    monkeypatch.setenv(name, "1.5")
    hook = (lambda: should_force_retry("a")) if "RETRY" in name else should_fail_poll
    with pytest.raises(ValueError, match=f"{name} must be a number from 0 to 1, got '1.5'"):
        hook()


@pytest.mark.parametrize("max_held", [0, 4, 64])
@pytest.mark.parametrize("decode_holds", [0, 5, 9, 12])
def test_what_was_gathered_while_bootstrap_was_pending_leaves_at_once(max_held, decode_holds):
    cluster = Cluster(retries=1, max_held=max_held, window=8)
    prompt = prompt_of(46)  # 12 pages, gathered 3 and 1 by turns
    if decode_holds:
        cluster.submit(cluster.request("warm", prompt[: 4 * decode_holds + 1], 2, local=True))
        cluster.run()
    request = cluster.request("a", prompt, 4)
    cluster.submit(request, decode_delay=20)
    for _ in range(15):
        cluster.tick()
    assert cluster.prefill._sending.holding.num_pages == {0: 0, 4: 4, 64: 12}[max_held]
    gathers = []
    gather = cluster.prefill_engine.gather
    cluster.prefill_engine.gather = lambda pages: gathers.append(len(pages)) or gather(pages)
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt, 4)
    assert cluster.link.rooms[request.room].num_sent_pages == 12 - min(decode_holds, 11)
    if max_held == 64:
        assert sum(gathers) == {0: 0, 5: 7, 9: 3, 12: 0}[decode_holds], "only a prefix that ends inside a chunk is gathered anew"
    cluster.assert_nothing_held()


def test_chunks_held_for_an_aborted_request_are_let_go():
    cluster = Cluster(retries=1)
    cluster.submit(cluster.request("a", prompt_of(46), 4), decode_delay=50)
    for _ in range(15):
        cluster.tick()
    assert cluster.prefill._sending.holding.num_pages == 12
    cluster.prefill.abort("a")
    cluster.late.clear()
    cluster.run()
    cluster.assert_nothing_held()
