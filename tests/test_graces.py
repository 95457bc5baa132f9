"""When a request goes ahead of its bootstrap, and how much later after each lost forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.protocol import Sampling, SequenceRequest
from pdjax.scheduler.graces import Backoff, Graces
from pdjax.scheduler.ticket import Ticket
from tests.scheduler_harness import Cluster, expected_answer
from tests.test_schedulers import prompt_of

BACKOFF = Backoff(first_s=4.0, max_s=20.0)


def ticket_of(name: str, room: int = 1, num_retries: int = 0) -> Ticket:
    request = SequenceRequest(request_id=name, room=room, prompt=[1], num_prior=0, sampling=Sampling(max_tokens=1), deadline_s=1e9)
    return Ticket(request, sender=None, num_retries=num_retries)  # type: ignore[arg-type]  # nothing here looks at the sender


@given(room=st.integers(0, 2**63 - 1))
def test_the_wait_doubles_with_each_lost_forward_up_to_its_bound_less_at_most_half(room: int) -> None:
    longest = [4.0, 8.0, 16.0, 20.0, 20.0]
    waits = [BACKOFF.wait_s(num_lost, room) for num_lost in range(1, 6)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert waits == [BACKOFF.wait_s(num_lost, room) for num_lost in range(1, 6)], "the same every time"
    assert BACKOFF.wait_s(10**6, room) <= 20.0


def test_requests_that_were_lost_together_come_back_apart() -> None:
    waits = sorted(BACKOFF.wait_s(1, room) for room in range(100))
    assert len(set(waits)) == 100
    assert waits[10] < 2.5 < 3.5 < waits[90], "spread over all of the half"


def test_no_backoff_is_no_wait() -> None:
    assert Backoff(0.0, 0.0).wait_s(3, 7) == 0.0


def test_requests_go_ahead_in_order_of_arrival_once_their_grace_is_over() -> None:
    graces = Graces(5.0, BACKOFF)
    for name in ("z", "a", "m"):
        graces.add(ticket_of(name))
    assert list(graces.over(1.0)) == [] and graces.next_s() == 6.0
    graces.discard("a")
    assert list(graces.over(5.9)) == []
    assert list(graces.over(6.0)) == ["z", "m"] and graces.next_s() is None
    graces.discard("z")
    assert list(graces.over(7.0)) == ["m"]


def test_a_time_starts_when_the_queue_looks_and_anew_after_a_lost_forward_only() -> None:
    graces, ticket = Graces(5.0, BACKOFF), ticket_of("a")
    graces.add(ticket)
    graces.over(10.0)
    assert list(graces.over(15.0)) == ["a"]
    graces.discard("a")
    graces.add(ticket)  # for want of a slot: it has waited already
    assert list(graces.over(16.0)) == ["a"]
    graces.discard("a")
    ticket.num_retries, ticket.ahead_s = 1, None
    graces.add(ticket)
    assert list(graces.over(100.0)) == []
    assert graces.next_s() == 100.0 + BACKOFF.wait_s(1, 1)
    graces.discard("a")
    assert graces.next_s() is None and list(graces.over(1e9)) == []


def test_a_request_that_is_queued_again_before_the_next_look_is_there_once() -> None:
    graces, ticket = Graces(0.0, BACKOFF), ticket_of("a")
    graces.add(ticket)
    graces.discard("a")
    graces.add(ticket)
    assert list(graces.over(1.0)) == ["a"]
    graces.discard("a")
    assert list(graces.over(2.0)) == []


@pytest.mark.parametrize("retries", [1, 2, 3])
def test_forwards_of_a_prompt_that_decode_lets_wait_are_spaced_and_bounded(retries: int) -> None:
    cluster = Cluster(retries=retries, drop_on_miss=True, backoff=BACKOFF)
    request = cluster.request("a", prompt_of(12), 3)
    cluster.submit(request, decode_delay=80)
    launched: list[float] = []
    while len(cluster.tokens["a"]) == 0:
        before = cluster.num_forwards["a"]
        cluster.tick()
        launched += [cluster.now] * (cluster.num_forwards["a"] - before)
    assert len(launched) == retries + 1
    assert launched[-1] >= 80, "the last one when decode has announced itself"
    gaps = [after - before for before, after in zip(launched, launched[1:-1], strict=False)]
    waits = [BACKOFF.wait_s(num_lost, request.room) for num_lost in range(1, retries)]
    # A few ticks go by until a forward is known to be lost.
    assert all(wait <= gap <= wait + 4 for gap, wait in zip(gaps, waits, strict=True))
    cluster.run()
    assert cluster.answer("a") == expected_answer(prompt_of(12), 3)
    cluster.assert_nothing_held()


def test_while_it_waits_after_a_lost_forward_a_request_holds_its_sender_only_and_its_bootstrap_ends_the_wait() -> None:
    cluster = Cluster(retries=3, drop_on_miss=True, backoff=Backoff(1000.0, 1000.0))
    cluster.submit(cluster.request("a", prompt_of(20), 3, deadline_s=5000.0), decode_delay=30)
    for _ in range(20):
        cluster.tick()
    assert cluster.prefill.metadata.num_held == cluster.prefill.slots.num_held == cluster.prefill.memory.num_private == 0
    assert 500.0 < (cluster.prefill.next_deadline_s() or 0.0) < 1020.0
    cluster.run(60)
    assert cluster.num_forwards["a"] == 2
    assert cluster.answer("a") == expected_answer(prompt_of(20), 3)
    cluster.assert_nothing_held()
