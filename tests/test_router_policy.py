"""Fleet and policy by hand, under a clock that the test turns."""

from __future__ import annotations

import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.errors import NoWorker, OverCapacity
from pdjax.protocol import WorkerLoad
from pdjax.router.affinity import PrefixMemory, block_keys
from pdjax.router.fleet import Fleet, Health, Member
from pdjax.router.policy import Pair, PairPolicy, Tried
from tests.test_router_fakes import LAYOUT, READY, worker_info


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Setup:
    """Workers of the names given (p... prefill, d... decode), all ready. Pages hold 4 tokens, workers 8 sequences."""

    def __init__(self, names: str = ""):
        self.clock = Clock()
        self.fleet = Fleet(self.clock, heartbeat_timeout_s=3.0, stall_timeout_s=30.0)
        self.policy = PairPolicy(self.fleet)
        self.members = {name: self.add(name) for name in names.split()}

    def add(self, name: str, load: WorkerLoad = READY, **changes: object) -> Member:
        member = self.fleet.join(worker_info(name, **changes))
        self.fleet.heartbeat(name, load)
        return member

    def choose(self, prompt: list[int] | None = None, **tried: object) -> tuple[str | None, str]:
        return names(self.policy.choose_pair(prompt or [1, 2, 3], Tried(**tried)))


def names(pair: Pair) -> tuple[str | None, str]:
    return None if pair.prefill is None else pair.prefill.instance_id, pair.decode.instance_id


# ---- Membership and health ----


def test_a_worker_takes_work_from_its_first_ready_heartbeat_until_it_falls_silent() -> None:
    setup = Setup()
    member = setup.fleet.join(worker_info("d1"))
    assert setup.fleet.health(member) is Health.LOADING and not setup.fleet.is_ready()
    setup.fleet.heartbeat("d1", WorkerLoad(ready=False))
    assert setup.fleet.available("decode") == []
    setup.fleet.heartbeat("d1", READY)
    assert setup.fleet.available("decode") == [member] and setup.fleet.is_ready()
    setup.clock.now_s += 2.9
    assert setup.fleet.health(member) is Health.READY
    setup.clock.now_s += 0.1
    assert setup.fleet.health(member) is Health.SILENT and setup.fleet.available("decode") == []
    setup.fleet.heartbeat("d1", READY)
    assert setup.fleet.available("decode") == [member]


def test_a_suspect_goes_last_until_its_next_heartbeat() -> None:
    setup = Setup("p1 d1 d2")
    setup.fleet.suspect(setup.members["d1"])
    assert setup.fleet.health(setup.members["d1"]) is Health.SUSPECT
    assert setup.choose() == ("p1", "d2")
    setup.fleet.suspect(setup.members["d2"])
    assert setup.choose() == ("p1", "d1"), "a suspect is better than nobody"
    assert not setup.fleet.is_ready()
    setup.fleet.heartbeat("d2", READY)
    assert setup.choose() == ("p1", "d2") and setup.fleet.is_ready()


def test_a_new_instance_behind_an_address_replaces_the_old_one_at_once() -> None:
    setup = Setup("p1 d1")
    old = setup.members["d1"]
    dispatch = setup.fleet.dispatch(old, 10)
    setup.add("d1b", address="d1:1")
    assert [member.instance_id for member in setup.fleet.members()] == ["p1", "d1b"]
    assert setup.fleet.gone_at(old, last_event_s=setup.clock()) == float("-inf")
    assert setup.fleet.num_outstanding == 1
    setup.fleet.release(dispatch)
    assert setup.fleet.num_outstanding == 0
    assert not setup.fleet.heartbeat("d1", READY)
    with pytest.raises(ValueError, match="worker d1 at d1:1 has been replaced by d1b"):
        setup.fleet.join(worker_info("d1"))
    assert setup.choose() == ("p1", "d1b")


def test_a_broken_membership_stream_takes_the_worker_out_at_once_and_coming_back_takes_it_in() -> None:
    setup = Setup("d1")
    member = setup.members["d1"]
    dispatch = setup.fleet.dispatch(member, 10)
    first_link = member.link
    setup.fleet.lose("d1", first_link)
    assert setup.fleet.available("decode") == []
    assert setup.add("d1") is member and member.outstanding_sequences == 1, "what it works on stays counted"
    setup.fleet.lose("d1", first_link)
    assert setup.fleet.available("decode") == [member], "the end of an old stream says nothing about the new one"
    setup.fleet.release(dispatch)
    setup.fleet.lose("d1", member.link)
    setup.fleet.prune()
    assert setup.fleet.members() == [member], "it may still come back"
    setup.clock.now_s += 3.0
    setup.fleet.prune()
    assert setup.fleet.members() == []


def test_a_worker_that_left_is_forgotten_when_its_last_sequence_has_ended() -> None:
    setup = Setup("d1")
    member = setup.members["d1"]
    dispatch = setup.fleet.dispatch(member, 10)
    setup.fleet.leave("d1")
    setup.fleet.lose("d1", member.link)
    setup.fleet.prune()
    assert setup.fleet.members() == [member] and setup.fleet.available("decode") == []
    assert setup.fleet.gone_at(member, last_event_s=110.0) == 140.0
    setup.fleet.release(dispatch)
    setup.fleet.release(dispatch)
    assert (member.outstanding_sequences, member.outstanding_tokens) == (0, 0)
    setup.fleet.prune()
    assert setup.fleet.members() == []


def test_a_sequence_is_given_up_after_the_later_of_heartbeat_and_event() -> None:
    setup = Setup("d1")
    assert setup.fleet.gone_at(setup.members["d1"], last_event_s=99.0) == 103.0
    assert setup.fleet.gone_at(setup.members["d1"], last_event_s=102.0) == 105.0


def test_limits_are_the_smallest_and_outlive_the_fleet() -> None:
    setup = Setup()
    assert setup.fleet.limits() is None
    setup.add("p1", max_context_tokens=500, max_prompt_tokens=400)
    setup.add("d1", max_context_tokens=600, max_prompt_tokens=300)
    assert setup.fleet.limits() == (500, 300)
    setup.fleet.leave("p1")
    setup.fleet.leave("d1")
    assert setup.fleet.limits() == (600, 300)


def test_workers_are_counted_by_role_and_health() -> None:
    setup = Setup("p1 p2 d1")
    setup.fleet.suspect(setup.members["p2"])
    setup.fleet.lose("d1", setup.members["d1"].link)
    assert [setup.fleet.count("prefill", health) for health in Health] == [1, 0, 1, 0]
    assert [setup.fleet.count("decode", health) for health in Health] == [0, 0, 0, 1]


# ---- Choosing ----


def test_ties_go_to_the_worker_that_joined_first() -> None:
    setup = Setup("p2 d2 p1 d1")
    assert setup.choose() == ("p2", "d2")


def test_prefill_goes_where_the_fewest_prompt_tokens_wait() -> None:
    setup = Setup("p1 p2 d1")
    long = setup.fleet.dispatch(setup.members["p1"], 100)
    setup.fleet.dispatch(setup.members["p2"], 40)
    setup.fleet.dispatch(setup.members["p2"], 40)
    assert setup.choose()[0] == "p2"
    setup.fleet.release(long)
    assert setup.choose()[0] == "p1"


def test_decode_goes_where_most_request_slots_are_free_by_load_or_by_own_count() -> None:
    setup = Setup("p1 d1 d2")
    setup.fleet.heartbeat("d1", WorkerLoad(ready=True, running=2, waiting=1, free_pages=1000))
    assert setup.choose()[1] == "d2"
    for _ in range(4):  # not in d2's heartbeat yet
        setup.fleet.dispatch(setup.members["d2"], 3)
    assert setup.choose()[1] == "d1"


def test_decode_without_pages_for_the_prompt_goes_last() -> None:
    setup = Setup("p1 d1 d2")
    setup.fleet.heartbeat("d1", WorkerLoad(ready=True, free_pages=2))
    setup.fleet.heartbeat("d2", WorkerLoad(ready=True, running=5, free_pages=50))
    assert setup.choose([1] * 8)[1] == "d1", "8 tokens fit into 2 pages of 4"
    assert setup.choose([1] * 9)[1] == "d2"
    setup.fleet.release(setup.fleet.dispatch(setup.members["d1"], 1))
    assert setup.choose([1] * 8)[1] == "d2", "a page was promised since the last heartbeat"
    setup.fleet.heartbeat("d1", WorkerLoad(ready=True, free_pages=2))
    assert setup.choose([1] * 8)[1] == "d1"


def test_workers_that_failed_the_sequence_go_last_and_full_ones_not_at_all() -> None:
    setup = Setup("p1 p2 d1 d2")
    assert setup.choose(failed={"p1", "d1"}) == ("p2", "d2")
    assert setup.choose(failed={"p1", "p2", "d1", "d2"}) == ("p1", "d1")
    assert setup.choose(full={"p1"}, failed={"p2"}) == ("p2", "d1")
    with pytest.raises(OverCapacity, match="every prefill worker is full"):
        setup.choose(full={"p1", "p2"})
    with pytest.raises(OverCapacity, match="every decode worker is full"):
        setup.choose(full={"d1", "d2"})


def test_without_prefill_decode_is_alone_and_without_decode_nobody_is() -> None:
    setup = Setup("p1 d1")
    setup.fleet.leave("p1")
    assert setup.choose() == (None, "d1")
    setup.fleet.leave("d1")
    with pytest.raises(NoWorker):
        setup.choose()
    with pytest.raises(NoWorker):
        setup.policy.choose_decode([1], Tried())


def test_choose_decode_leaves_prefill_out() -> None:
    setup = Setup("p1 d1 d2")
    assert names(setup.policy.choose_decode([1], Tried(failed={"d1"}))) == (None, "d2")


def test_a_pair_of_different_layouts_is_never_chosen_and_logged_once_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup("p1 d1")
    setup.add("p2", layout=msgspec.structs.replace(LAYOUT, page_size=8))
    setup.fleet.dispatch(setup.members["p1"], 1000)
    with caplog.at_level(logging.ERROR):
        assert [setup.choose() for _ in range(2)] == [("p1", "d1")] * 2
        setup.fleet.leave("p1")
        assert setup.choose() == (None, "d1")
    (record,) = caplog.records
    assert "p2:1" in record.getMessage() and "page_size 8 here, 4 there" in record.getMessage()


def test_a_refused_pair_is_not_chosen_again_but_its_workers_are() -> None:
    setup = Setup("p1 d1")
    assert setup.choose(refused={("p1", "d1")}) == (None, "d1")
    setup.add("p2")
    assert setup.choose(refused={("p1", "d1")}) == ("p2", "d1")


def test_later_attempts_stay_with_the_weights_of_the_first() -> None:
    setup = Setup("p1 d1")
    other = msgspec.structs.replace(LAYOUT, model_fingerprint="g")
    setup.add("p2", layout=other)
    setup.add("d2", layout=other)
    assert setup.choose(fingerprint="g") == ("p2", "d2")
    assert setup.choose(fingerprint="f") == ("p1", "d1")
    with pytest.raises(NoWorker):
        setup.choose(fingerprint="h")


# ---- Prefix affinity ----


def test_a_prompt_goes_where_its_beginning_was_computed_unless_that_worker_is_busier_than_that_saves() -> None:
    setup = Setup("p1 p2 d1")
    prompt = list(range(20))
    setup.policy.computed(setup.members["p2"], prompt[:12])
    pair = setup.policy.choose_pair(prompt, Tried())
    assert names(pair)[0] == "p2" and pair.prefill_tokens == 8, "3 pages of 4 are remembered"
    held = setup.fleet.dispatch(setup.members["p2"], 11)
    assert setup.choose(prompt)[0] == "p2", "8 + 11 < 20"
    setup.fleet.dispatch(setup.members["p2"], 2)
    assert setup.choose(prompt)[0] == "p1", "8 + 13 > 20"
    setup.fleet.release(held)
    assert setup.choose(prompt[1:])[0] == "p1", "another beginning is another prompt"


def test_a_prompt_that_is_wholly_remembered_still_costs_a_token() -> None:
    setup = Setup("p1 d1")
    setup.policy.computed(setup.members["p1"], [1] * 8)
    assert setup.policy.choose_pair([1] * 8, Tried()).prefill_tokens == 1


def test_block_keys_cover_whole_blocks_and_all_before_them() -> None:
    assert block_keys([1, 2, 3], 4) == []
    assert len(block_keys([1] * 11, 4)) == 2
    one, two = block_keys([1, 2, 3, 4, 9, 9, 9, 9], 4)
    assert block_keys([1, 2, 3, 4, 5, 6, 7, 8], 4)[0] == one
    assert block_keys([4, 3, 2, 1, 9, 9, 9, 9], 4)[1] != two


def test_the_memory_forgets_what_was_used_longest_ago_and_ends_of_prompts_first() -> None:
    memory = PrefixMemory(4)
    memory.remember("a", [1, 2, 3])
    memory.remember("a", [10, 11])
    assert len(memory) == 4
    assert memory.num_known("a", [1, 2, 3]) == 2
    assert memory.num_known("a", [10, 11]) == 2
    assert memory.num_known("b", [10, 11]) == 0


def test_a_memory_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        PrefixMemory(0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)), max_size=30))
def test_the_memory_never_exceeds_its_bound_and_keeps_the_last_prompt_as_far_as_it_fits(calls: list[tuple[str, list[int]]]) -> None:
    memory = PrefixMemory(4)
    for name, keys in calls:
        memory.remember(name, keys)
        assert len(memory) <= 4
        assert memory.num_known(name, keys) == min(len(keys), 4)


@given(st.data())
def test_outstanding_work_always_returns_to_nothing(data: st.DataObject) -> None:
    setup = Setup("p1 p2 d1")
    open_dispatches = []
    for _ in range(data.draw(st.integers(0, 20))):
        if open_dispatches and data.draw(st.booleans()):
            setup.fleet.release(open_dispatches.pop(data.draw(st.integers(0, len(open_dispatches) - 1))))
        else:
            member = setup.members[data.draw(st.sampled_from(["p1", "p2", "d1"]))]
            open_dispatches.append(setup.fleet.dispatch(member, data.draw(st.integers(1, 50))))
        assert setup.fleet.num_outstanding == len(open_dispatches)
    for dispatch in open_dispatches * 2:
        setup.fleet.release(dispatch)
    assert setup.fleet.num_outstanding == 0
    assert all((member.outstanding_sequences, member.outstanding_tokens) == (0, 0) for member in setup.members.values())
