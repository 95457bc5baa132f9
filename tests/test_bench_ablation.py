"""The ablation benchmark, against scripted servers and a ticking clock: nothing here starts a worker or depends on how fast it is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdjax import bench
from pdjax.benchmarks import ablation, fleet, load, system
from pdjax.benchmarks.ablation import Surroundings, Watch
from pdjax.benchmarks.ablation_plan import (
    EXPERIMENTS,
    AblationSettings,
    Emulation,
    Plan,
    default_settings,
    kv_bytes_per_token,
    total_requests,
)
from pdjax.benchmarks.ablation_report import Comparison, Goal, ModeRun, build_report, goals_of, hidden_share, interval
from pdjax.benchmarks.client import Endpoint, RequestFailed, Sample, parse_url
from pdjax.benchmarks.load import Block, Outcome, PromptShape
from tests.scripted_server import OK, ScriptedServer, answer, chunk

# What is started


def settings_of(experiment: str, load: str = "turns", **changes: Any) -> AblationSettings:
    return AblationSettings(experiment, **{**default_settings(experiment, load), "load": load, **changes})


def modes_of(experiment: str) -> dict[str, set[str]]:
    return {mode.name: set(mode.overrides) for mode in Plan(settings_of(experiment)).modes()}


def test_the_modes_of_an_experiment_differ_in_its_technique_only() -> None:
    assert modes_of("optimistic") == {
        "off": {"scheduler.optimistic_prefill_retries=0", "scheduler.on_miss=park"},
        "on": {"scheduler.optimistic_prefill_retries=1", "scheduler.on_miss=park"},
    }
    early = modes_of("early-send")
    assert early["on"] ^ early["off"] == {"scheduler.early_send_cached_prefix=false", "scheduler.early_send_cached_prefix=true"}
    both = modes_of("both")
    assert len(both["on"] - both["off"]) == 2
    assert list(modes_of("retry-storm")) == ["n0", "n1", "n3"]
    assert "scheduler.optimistic_prefill_retries=3" in modes_of("retry-storm")["n3"]


def test_decode_holds_no_prefix_and_prefill_does() -> None:
    plan = Plan(settings_of("early-send"))
    roles = plan.roles(plan.modes()[1], Emulation())
    assert roles.prefill.scheduler.prefix_cache and not roles.decode.scheduler.prefix_cache
    assert plan.num_cached == 1632  # 80 % of 2,048 is 1,638.4; a page holds 16 tokens


@pytest.mark.parametrize(
    ("experiment", "load"), [*((name, "turns") for name in EXPERIMENTS), *((name, "poisson") for name in EXPERIMENTS[:3])]
)
def test_the_systems_of_every_experiment_have_room_for_its_requests(experiment: str, load: str) -> None:
    plan = Plan(settings_of(experiment, load))
    for mode in plan.modes():
        _, prefill, decode = plan.roles(mode, Emulation())
        prompt = plan.settings.prompt_tokens
        assert prefill.engine.prefill_buckets[-1] == prefill.scheduler.max_step_tokens
        assert prefill.engine.num_pages * 16 > prompt + (prefill.engine.max_running - 1) * (prompt - plan.num_cached)
        assert decode.engine.max_running == (1 if load == "poisson" else 2)
        assert decode.engine.num_pages * 16 > 2 * (prompt + plan.settings.out)


def test_every_process_gets_the_overrides_of_the_command_line() -> None:
    plan = Plan(settings_of("optimistic", overrides=("engine.page_size=32", "scheduler.prefix_cache=true")))
    roles = plan.roles(plan.modes()[0], Emulation())
    assert [config.engine.page_size for config in roles] == [32, 32, 32]
    assert roles.decode.scheduler.prefix_cache


def test_the_emulation_is_scaled_to_the_forward() -> None:
    """46,080 bytes a token: K and V of 30 layers with 3 heads of 64 numbers of 4 bytes."""
    assert kv_bytes_per_token(Plan(settings_of("optimistic")).base) == 46080
    assert Plan(settings_of("optimistic")).calibrated(0.5) == Emulation(0.5, announce_delay_s=0.5)
    assert Plan(settings_of("early-send", prompt_tokens=1000)).calibrated(0.5) == Emulation(0.5, gbytes_per_s=pytest.approx(0.09216))
    assert Plan(settings_of("both", prompt_tokens=1000)).calibrated(0.5) == Emulation(0.5, 0.25, pytest.approx(0.09216))


def test_an_environment_that_decides_for_both_modes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDJAX_EARLY_SEND_CACHED_PREFIX", "0")
    with pytest.raises(ValueError, match="PDJAX_EARLY_SEND_CACHED_PREFIX would decide for both modes"):
        Plan(settings_of("early-send"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiment": "late-send"}, "experiment must be one of optimistic, early-send, both, retry-storm, got 'late-send'"),
        ({"load": "steady"}, "load must be one of turns, poisson, got 'steady'"),
        ({"on_miss": "cry"}, "on_miss must be one of park, retry, got 'cry'"),
        ({"prompt_tokens": 31}, "prompt_tokens must be at least 32, got 31"),
        ({"out": 2}, "out must be at least 3, got 2"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"step_tokens": 15}, "step_tokens must be at least 16, got 15"),
        ({"cached_share": 1.0}, "cached_share must be at least 0 and below 1, got 1.0"),
        ({"utilisation": 1.0}, "utilisation must be above 0 and below 1, got 1.0"),
        ({"delay_share": 0.0}, "delay_share must be above 0, got 0.0"),
        ({"experiment": "retry-storm", "load": "poisson"}, "load poisson has no meaning with retry-storm"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        AblationSettings(**{"experiment": "optimistic", **changes})
    assert message in str(error.value)


# Load


def sender(out: int = 3, num_cached: int | None = None) -> load.Sender:
    return load.Sender(out, num_cached, 30.0, itertools.count().__next__, lambda: None)


def target(server: ScriptedServer, name: str = "off") -> load.Target:
    return load.Target(name, parse_url(server.url), "scripted")


def test_prompts_share_their_start_and_differ_behind_it() -> None:
    shape = PromptShape(40, 30, 48000)
    one, other = load.make_prompts(shape, 1, "a"), load.make_prompts(shape, 1, "b")
    prompts = [next(one), next(one), next(other)]
    assert all(prompt[:30] == load.shared_prefix(shape, 1) for prompt in prompts)
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 3
    assert next(load.make_prompts(shape, 1, "a")) == prompts[0]
    assert load.shared_prefix(shape, 2) != load.shared_prefix(shape, 1)


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    times_s = load.poisson_times(2.0, 4001, seed=3)
    assert times_s[0] == 0 and times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(2000, rel=0.1)
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    # exp(-1) of an exponential exceed its mean.
    assert sum(gap_s > 0.5 for gap_s in gaps_s) / len(gaps_s) == pytest.approx(0.3679, abs=0.05)


def test_targets_take_turns_in_an_order_that_alternates() -> None:
    order: list[str] = []

    def reply(name: str) -> ScriptedServer:
        return ScriptedServer(lambda request: order.append(f"{name}{request['prompt'][0]}") or answer(3))

    with reply("a").running() as first, reply("b").running() as second:
        targets = [target(first, "a"), target(second, "b")]
        outcomes = asyncio.run(load.in_turns(sender(), targets, [[1], [2], [3]]))
    assert order == ["a1", "b1", "b2", "a2", "a3", "b3"]
    assert [len(outcomes[name]) for name in ("a", "b")] == [3, 3]


def test_a_prompt_that_was_not_cached_as_planned_is_an_error_not_a_sample() -> None:
    replies = iter([answer(3, cached_tokens=32), answer(3, cached_tokens=0)])
    with ScriptedServer(lambda request: next(replies)).running() as server:
        outcomes = asyncio.run(load.in_turns(sender(num_cached=32), [target(server)], [[1], [2]]))["off"]
    assert outcomes[0].sample is not None and outcomes[0].sample.cached_tokens == 32
    assert outcomes[1] == Outcome(None, "0 prompt tokens were cached, expected 32")


def test_warm_up_computes_the_shared_prefix_on_prefill_alone() -> None:
    server = ScriptedServer(lambda request: answer(request["max_tokens"]))
    with server.running():
        asyncio.run(load.warm_up(sender(), target(server), [7, 8], [[1], [2]], 30.0))
    assert [(request["prompt"], request["max_tokens"]) for request in server.requests] == [([7, 8, 7], 1), ([1], 3), ([2], 3)]


def test_a_warm_up_that_fails_says_so() -> None:
    with ScriptedServer(lambda request: [b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"]).running() as server:
        with pytest.raises(RequestFailed, match="on: warm-up: HTTP 503: busy"):
            asyncio.run(load.warm_up(sender(), target(server, "on"), [], [[1]], 30.0))


def test_a_closed_loop_keeps_its_number_of_requests_in_flight_and_the_order_of_its_outcomes() -> None:
    """The server answers nobody before three requests are there, and tells prompt i that i tokens were cached."""
    server = ScriptedServer(lambda request: answer(3, cached_tokens=request["prompt"][0]), num_meeting=3)
    with server.running():
        asyncio.run(load.warm_up(sender(), target(server), [], [[0]], 30.0))
        block = asyncio.run(load.without_pause(sender(), target(server), [[number] for number in range(1, 7)], 3))
    assert [outcome.sample and outcome.sample.cached_tokens for outcome in block.outcomes] == [1, 2, 3, 4, 5, 6]
    assert block.duration_s > 0


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Nobody is answered before three are there: a loop that waited for the first answer would never send the second."""
    server = ScriptedServer(lambda request: answer(3), num_meeting=3)
    with server.running():
        asyncio.run(load.warm_up(sender(), target(server), [], [[0]], 30.0))
        block = asyncio.run(load.at_times(sender(), target(server), [[1], [2], [3]], [0.0, 0.01, 0.02]))
    assert [outcome.error for outcome in block.outcomes] == [None, None, None]


# Statistics


def sample(ttft_s: float, handoff_s: float = 1.0, itl_s: float = 0.5) -> Sample:
    return Sample(ttft_s, (handoff_s, itl_s), ttft_s + handoff_s + itl_s, 3, None)


def mode_run(name: str, *samples: Sample) -> ModeRun:
    return ModeRun(name, [Outcome(each, None) for each in samples])


def report_of(settings: AblationSettings, comparisons: dict[str, Comparison]) -> dict[str, Any]:
    return build_report(settings, "m", [Emulation(2.0, 1.5, None)], comparisons)


def test_the_numbers_of_a_comparison_are_the_ones_worked_out_by_hand() -> None:
    off = mode_run(
        "off", sample(4.0, handoff_s=2.0, itl_s=0.5), sample(2.0, handoff_s=1.0, itl_s=0.25), sample(3.0, handoff_s=1.5, itl_s=0.75)
    )
    on = mode_run("on", sample(1.0, handoff_s=0.5, itl_s=0.5), sample(1.5, handoff_s=0.3, itl_s=0.5), sample(0.5, handoff_s=0.2, itl_s=0.5))
    off.outcomes.append(Outcome(None, "HTTP 500: oops"))
    on.outcomes.append(Outcome(sample(1.0, handoff_s=0.3), None))
    report = report_of(settings_of("optimistic"), {"emulated": Comparison(off, on), "control": Comparison(off, off)})
    assert report["modes"]["off"] == {
        "ttft_s": 3.0, "ttft_mean_s": 3.0, "handoff_s": 1.5, "itl_s": 0.5, "tokens_per_s": pytest.approx(3 / 5.25),
        "requests": 4, "completed": 3, "errors": 1, "error_messages": {"HTTP 500: oops": 1}, "duration_s": None, "block_tokens_per_s": [],
    }  # fmt: skip
    assert report["ratio_ttft"] == pytest.approx(1 / 3) and report["ratio_ttft_mean"] == pytest.approx(1 / 3)
    assert report["ratio_handoff"] == pytest.approx(0.2) and report["ratio_itl"] == 1.0
    assert report["comparisons"]["control"]["ratio_handoff"] == 1.0
    assert report["ci95"]["ratio_ttft"] is None  # three pairs
    assert report["emulation"] == [{"forward_s": 2.0, "announce_delay_s": 1.5, "gbytes_per_s": None}]
    assert report["hidden_share"] == {"ttft": pytest.approx(4 / 3), "handoff": None}  # 3.0 - 1.0 of min(1.5, 3.0 - 1.5)
    assert len(report["comparisons"]["emulated"]["modes"]["on"]["samples"]) == 4


def test_the_hidden_share_is_that_of_what_could_be_hidden() -> None:
    """An announcement that is 1 s late and a forward of 3 s: at best the 4 s become 3, and they became 3.5. The cached four fifths of a
    prompt take 2.4 s on a link that moves all of it in 3 s, and 1.8 s of the hand-off went away."""
    off, on = {"ttft_s": 4.0, "handoff_s": 3.1}, {"ttft_s": 3.5, "handoff_s": 1.3}
    assert hidden_share(0.8, [Emulation(3.0, 1.0, 0.01)], off, on) == {"ttft": 0.5, "handoff": pytest.approx(0.75)}
    assert hidden_share(0.8, [Emulation(3.0, None, None)], off, on) == {"ttft": None, "handoff": None}


def test_the_interval_pairs_requests_and_is_the_same_each_time() -> None:
    """Every pair has the ratio 1/2, whatever is drawn; pairs of different ratios give an interval around the median."""

    def of(samples: Sequence[Sample]) -> float:
        return sum(each.ttft_s for each in samples)

    assert interval([(sample(2.0 * number), sample(1.0 * number)) for number in range(1, 9)], of) == [0.5, 0.5]
    mixed = [(sample(1.0), sample(ratio)) for ratio in (0.2, 0.4, 0.6, 0.8)]
    bounds = interval(mixed, of)
    assert bounds is not None and 0.2 <= bounds[0] < 0.5 < bounds[1] <= 0.8
    assert interval(mixed, of) == bounds
    assert interval(mixed[:3], of) is None


def test_tokens_per_second_under_load_are_those_of_all_requests_together() -> None:
    none, many = ModeRun("n0"), ModeRun("n3")
    for run, duration_s in ((none, 2.0), (none, 4.0), (many, 8.0)):
        run.add(Block([Outcome(sample(1.0), None), Outcome(sample(1.0), None), Outcome(None, "gone")], duration_s))
    report = report_of(settings_of("retry-storm"), {"n1": Comparison(none, none), "n3": Comparison(none, many)})
    assert report["modes"]["n0"]["tokens_per_s"] == 2.0 and report["modes"]["n0"]["block_tokens_per_s"] == [3.0, 1.5]
    assert report["ratio_tokens_per_s"] == 0.375 and report["ci95"]["ratio_tokens_per_s"] is None
    assert [(goal["value"], goal["is_met"]) for goal in report["goals"]] == [(1.0, True), (0.375, False)]


def test_a_mode_that_answered_nothing_misses_its_goals_and_still_is_reported() -> None:
    off, on = mode_run("off", sample(1.0)), ModeRun("on", [Outcome(None, "gone")])
    report = report_of(settings_of("early-send"), {"emulated": Comparison(off, on), "control": Comparison(off, off)})
    assert report["ratio_handoff"] is None and report["modes"]["on"]["ttft_s"] is None
    assert report["goals"][0] == {
        "name": "emulated: hand-off, on / off", "value": None, "limit": 0.3, "is_upper_limit": True, "is_met": False
    }  # fmt: skip
    assert all(goal["is_met"] for goal in report["goals"][1:])


def test_goals_have_the_limits_that_they_were_given() -> None:
    assert Goal("g", 0.5, 0.5).is_met and not Goal("g", 0.51, 0.5).is_met
    assert Goal("g", 0.98, 0.98, is_upper_limit=False).is_met and not Goal("g", 0.97, 0.98, is_upper_limit=False).is_met

    def limits(experiment: str, load: str = "turns") -> dict[str, float]:
        numbers = dict.fromkeys(("ratio_ttft", "ratio_ttft_mean", "ratio_handoff", "ratio_itl", "ratio_tokens_per_s"), 1.0)
        goals = goals_of(settings_of(experiment, load), {"emulated": numbers, "control": numbers})
        return {goal.name: goal.limit for goal in goals}

    assert limits("optimistic") == {
        "emulated: TTFT, on / off": 0.5, "emulated: ITL, on / off": 1.02, "emulated: tokens/s, on / off": 0.98,
        "control: TTFT, on / off": 1.02, "control: hand-off, on / off": 1.02, "control: ITL, on / off": 1.02,
        "control: tokens/s, on / off": 0.98,
    }  # fmt: skip
    assert limits("early-send")["emulated: hand-off, on / off"] == 0.3
    assert limits("optimistic", "poisson") == {"emulated: mean TTFT, on / off": pytest.approx(1 / 1.9)}
    assert "emulated: hand-off, on / off" not in limits("both")


def test_counters_of_workers_are_read_off_the_metrics_page() -> None:
    page = "\n".join(
        [
            "# TYPE pdjax_worker_early_sent_pages_total counter",
            'pdjax_worker_early_sent_pages_total{role="prefill",worker="a:1"} 3.0',
            'pdjax_worker_early_sent_pages_total{role="prefill",worker="a:2"} 4.0',
            'pdjax_worker_stage_seconds_total{role="decode",stage="queue",worker="a:3"} 0.5',
            'pdjax_worker_running{role="prefill",worker="a:1"} 9.0',
            "pdjax_router_in_flight 1.0",
        ]
    )
    assert system.parse_worker_figures(page) == {"prefill.early_sent_pages": 7.0, "decode.stage_seconds.queue": 0.5}


# A whole run


class Systems:
    """Stands for what would be started: each system is a scripted server that finds four fifths of a prompt cached."""

    def __init__(self) -> None:
        self.started: list[tuple[int, bool, float, float | None]] = []
        self.running = 0
        self.requests: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def start(self, roles: system.Roles) -> AsyncIterator[Endpoint]:
        scheduler, transfer = roles.prefill.scheduler, roles.prefill.transfer
        self.started.append(
            (
                scheduler.optimistic_prefill_retries,
                scheduler.early_send_cached_prefix,
                transfer.emulate_announce_delay_s,
                transfer.emulate_gbytes_per_s,
            )
        )
        with ScriptedServer(self._reply).running() as server:
            self.running += 1
            try:
                yield parse_url(server.url)
            finally:
                self.running -= 1

    async def figures(self, endpoint: Endpoint) -> dict[str, float]:
        return {"prefill.early_sent_pages": float(len(self.requests))}

    def surroundings(self) -> Surroundings:
        return Surroundings(self.start, self.figures, itertools.count().__next__)

    def _reply(self, request: dict[str, Any]) -> list[bytes]:
        self.requests.append(request)
        return answer(request["max_tokens"], cached_tokens=len(request["prompt"]) * 4 // 5 // 16 * 16)


def run(settings: AblationSettings, systems: Systems) -> tuple[dict[str, Any], int, list[str]]:
    """The report, the requests that were told of, the steps."""
    told: list[None] = []
    steps: list[str] = []
    watch = Watch(steps.append, lambda: told.append(None))
    return asyncio.run(ablation.run(settings, watch, systems.surroundings())), len(told), steps


def test_a_run_measures_the_control_first_and_scales_the_emulation_to_it() -> None:
    """A request starts at tick t and its first token has tick t + 1, so that a forward takes one tick."""
    systems = Systems()
    settings = settings_of("both", prompt_tokens=100, requests=4, out=3, delay_share=0.5)
    report, told, steps = run(settings, systems)
    rate = 100 * 46080 / 1e9
    assert systems.started == [
        (0, False, 0.0, None), (1, True, 0.0, None), (0, False, 0.5, pytest.approx(rate)), (1, True, 0.5, pytest.approx(rate))
    ]  # fmt: skip
    assert systems.running == 0
    assert report["emulation"] == [{"forward_s": 1, "announce_delay_s": 0.5, "gbytes_per_s": pytest.approx(rate)}]
    for comparison in ("emulated", "control"):
        for mode in ("off", "on"):
            numbers = report["comparisons"][comparison]["modes"][mode]
            assert (numbers["completed"], numbers["errors"]) == (4, 0)
            assert (numbers["ttft_s"], numbers["handoff_s"], numbers["itl_s"]) == (1, 1, 1)
    assert report["ratio_ttft"] == report["ratio_handoff"] == 1.0
    assert told == total_requests(settings)
    assert steps[:2] == ["control: starting off", "control: starting on"]


def test_prompts_of_a_run_share_the_cached_part_and_reach_both_modes() -> None:
    systems = Systems()
    run(settings_of("early-send", prompt_tokens=100, requests=3, out=3), systems)
    long = [tuple(request["prompt"]) for request in systems.requests if request["max_tokens"] == 3]
    assert len({prompt[:80] for prompt in long}) == 1
    assert {long.count(prompt) for prompt in long} == {2}
    assert len(set(long)) == 2 * (2 + 3)  # in each condition two to warm up and three to measure


def test_the_order_of_systems_alternates_from_round_to_round() -> None:
    systems = Systems()
    report, told, _ = run(settings_of("optimistic", prompt_tokens=64, requests=1, rounds=2, cached_share=0.8), systems)
    assert [retries for retries, *_ in systems.started] == [0, 1, 0, 1, 1, 0, 1, 0]
    assert report["modes"]["on"]["requests"] == 2
    assert told == total_requests(settings_of("optimistic", requests=1, rounds=2))


def test_a_run_under_random_arrivals_calibrates_in_turns() -> None:
    systems = Systems()
    settings = settings_of("optimistic", "poisson", prompt_tokens=100, requests=5, rounds=1, utilisation=0.9)
    fast = Surroundings(systems.start, systems.figures, map(lambda tick: tick / 1000, itertools.count()).__next__)
    told: list[None] = []
    report = asyncio.run(ablation.run(settings, Watch(lambda step: None, lambda: told.append(None)), fast))
    assert report["modes"]["off"]["requests"] == report["modes"]["on"]["requests"] == 5
    assert report["comparisons"]["control"]["modes"]["on"]["requests"] == 6
    assert [goal["name"] for goal in report["goals"]] == ["emulated: mean TTFT, on / off"]
    assert len(told) == total_requests(settings)


def test_a_storm_compares_each_retry_budget_with_none() -> None:
    systems = Systems()
    settings = settings_of("retry-storm", prompt_tokens=64, cached_share=0.8, requests=9, rounds=1, decode_slots=1, out=3)
    report, told, _ = run(settings, systems)
    assert [started[:2] for started in systems.started] == [(0, True), (1, True), (3, True)]
    assert list(report["comparisons"]) == ["n1", "n3"] and set(report["modes"]) == {"n0", "n3"}
    assert report["modes"]["n3"]["completed"] == 9
    assert told == total_requests(settings)


def test_systems_are_stopped_when_a_warm_up_fails() -> None:
    systems = Systems()
    systems._reply = lambda request: [OK, chunk(b"data: oops\n\n"), chunk(b"")]  # type: ignore[method-assign]
    with pytest.raises(RequestFailed, match="event that is no JSON"):
        run(settings_of("optimistic", prompt_tokens=64), systems)
    assert len(systems.started) == 1 and systems.running == 0


# The command


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Systems:
    systems = Systems()
    measure = ablation.run
    monkeypatch.setattr(ablation, "run", lambda settings, watch: measure(settings, watch, systems.surroundings()))
    return systems


def test_the_command_prints_tables_and_writes_json_and_picture(
    scripted: Systems, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, png_path = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--prompt-tokens", "100", "--requests", "5", "--out", "4", "--json", str(json_path), "--plot", str(png_path)]
    assert bench.main(["ablation", "early-send", *options]) == 0
    printed = capsys.readouterr().out
    for word in ("early-send", "80% cached", "hand-off", "emulated: a link of", "prefill.early_sent_pages", "missed", "met"):
        assert word in printed
    report = json.loads(json_path.read_text())
    assert set(report) == {
        "schema_version", "benchmark", "experiment", "model", "machine", "settings", "emulation", "modes", "ratio_ttft", "ratio_ttft_mean",
        "ratio_handoff", "ratio_itl", "ratio_tokens_per_s", "ci95", "hidden_share", "comparisons", "goals",
    }  # fmt: skip
    assert set(report["modes"]["on"]) >= {"ttft_s", "handoff_s", "itl_s", "tokens_per_s"}
    assert report["settings"]["cached_share"] == 0.8 and report["settings"]["out"] == 4
    assert png_path.read_bytes().startswith(b"\x89PNG")


def test_a_request_that_fails_shows_in_output_and_exit_status(scripted: Systems, capsys: pytest.CaptureFixture[str]) -> None:
    reply, count = scripted._reply, itertools.count()

    def failing(request: dict[str, Any]) -> list[bytes]:
        return [b"HTTP/1.1 503 No\r\nContent-Length: 6\r\n\r\n[gone]"] if next(count) == 7 else reply(request)

    scripted._reply = failing  # type: ignore[method-assign]
    assert bench.main(["ablation", "optimistic", "--prompt-tokens", "64", "--cached-share", "0.8", "--requests", "3"]) == 1
    assert "control, on: 1 x HTTP 503: [gone]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["late-send"], "experiment must be one of optimistic, early-send, both, retry-storm, got 'late-send'"),
        (["optimistic", "--prompt-tokens", "8"], "prompt_tokens must be at least 32, got 8"),
        (["optimistic", "--set", "engine.pages=1"], "unknown field engine.pages"),
        (["optimistic", "--json", "/no/such/folder/out.json"], "cannot write /no/such/folder/out.json"),
        ([], "EXPERIMENT"),
    ],
)
def test_a_bad_command_line_ends_with_status_2_and_the_reason(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(["ablation", *argv])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_system_that_does_not_start_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(roles: system.Roles) -> contextlib.AbstractAsyncContextManager[Endpoint]:
        raise fleet.SystemFailed("decode ended with exit status 1")

    measure = ablation.run
    monkeypatch.setattr(ablation, "run", lambda settings, watch: measure(settings, watch, Surroundings(start=start)))
    assert bench.main(["ablation", "optimistic"]) == 1
    assert "decode ended with exit status 1" in capsys.readouterr().err
