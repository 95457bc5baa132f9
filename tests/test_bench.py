"""The benchmark command, against a scripted HTTP server and scripted clocks, so that every number can be worked out by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdjax import bench
from pdjax.benchmarks import ceilings, report, serve
from pdjax.benchmarks.client import Sample
from pdjax.benchmarks.serve import Measured, ServeSettings, make_prompts
from tests.scripted_server import ScriptedServer, answer, readings, serving

# Statistics


def test_quantiles_are_interpolated_between_neighbours() -> None:
    assert report.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert report.quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert report.quantile([5.0], 0.99) == 5.0
    assert report.quantile([3.0, 1.0, 2.0], 1.0) == 3.0


def test_a_summary_names_every_statistic() -> None:
    assert report.summarize([2.0, 4.0]) == {
        "count": 2, "mean": 3.0, "min": 2.0, "median": 3.0, "p90": pytest.approx(3.8), "p99": pytest.approx(3.98), "max": 4.0
    }  # fmt: skip
    assert report.summarize([]) is None


def test_the_report_of_a_length_is_the_one_worked_out_by_hand() -> None:
    samples = [Sample(0.5, (0.25, 0.75), 1.5, 3, 16), Sample(1.5, (0.5, 1.0), 3.0, 3, None)]
    settings = ServeSettings("http://host", out=3, requests=3, shared_prefix=64)
    result = serve.report_length(settings, Measured(32, samples, Counter({"HTTP 500: oops": 1}), duration_s=4.0))
    assert result["shared_prefix_tokens"] == 31
    assert (result["requests"], result["completed"], result["errors"]) == (3, 2, 1)
    assert result["error_messages"] == {"HTTP 500: oops": 1}
    assert result["ttft_s"]["median"] == 1.0
    assert (result["itl_s"]["count"], result["itl_s"]["median"], result["itl_s"]["max"]) == (4, 0.625, 1.0)
    assert result["handoff_s"]["mean"] == 0.375
    assert result["e2e_s"]["min"] == 1.5
    assert result["tokens_per_s"] == {"input": 16.0, "output": 1.5}
    assert result["cached_tokens"]["count"] == 1


# A whole run


def run(server: ScriptedServer, **settings: Any) -> dict[str, Any]:
    ticks = itertools.count().__next__
    with server.running():
        return asyncio.run(serve.run(ServeSettings(server.url, **settings), lambda prompt_tokens: None, ticks))


def test_a_run_warms_up_each_length_and_measures_the_rest() -> None:
    """The clock ticks once a reading. A request of 2 tokens has 4 pieces: it starts at t, tokens at t+1 and t+2, the end at t+4."""
    server = ScriptedServer(lambda request: answer(2, cached_tokens=len(request["prompt"]) - 1))
    measured = run(server, lens=(3, 5), out=2, requests=2)
    assert [len(request["prompt"]) for request in server.requests] == [3, 3, 3, 5, 5, 5]
    assert measured["model"] == "scripted"
    for prompt_tokens, result in zip((3, 5), measured["results"], strict=True):
        assert result["prompt_tokens"] == prompt_tokens
        assert (result["completed"], result["errors"]) == (2, 0)
        assert [result[key]["median"] for key in ("ttft_s", "itl_s", "handoff_s", "e2e_s")] == [1, 1, 1, 4]
        assert result["duration_s"] == 11  # two requests of 5 readings each, and the one at the end
        assert result["tokens_per_s"] == {"input": 2 * prompt_tokens / 11, "output": 4 / 11}
        assert result["cached_tokens"]["median"] == prompt_tokens - 1
        assert result["samples"] == 2 * [{"ttft_s": 1, "itl_s": (1,), "e2e_s": 4, "output_tokens": 2, "cached_tokens": prompt_tokens - 1}]


def test_requests_are_greedy_streamed_token_ids_that_ignore_the_end_of_sequence() -> None:
    server = ScriptedServer(lambda request: answer(2))
    run(server, lens=(3,), out=2, requests=1)
    request = server.requests[1]
    assert all(100 <= token_id < 48000 for token_id in request.pop("prompt"))
    assert request == {
        "model": "scripted",
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_failed_requests_are_counted_by_message_and_leave_the_others_alone() -> None:
    replies = iter([answer(1), answer(1), [b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"], answer(1)[:-2], answer(1)])
    server = ScriptedServer(lambda request: next(replies))
    (result,) = run(server, lens=(4,), out=1, requests=4)["results"]
    assert (result["completed"], result["errors"]) == (2, 2)
    assert result["error_messages"] == {"HTTP 500: ": 1, "connection closed or garbled in mid-answer": 1}
    assert result["itl_s"] is None and result["handoff_s"] is None and result["cached_tokens"] is None
    assert result["ttft_s"]["count"] == 2


def test_a_run_in_which_every_request_fails_still_reports() -> None:
    server = ScriptedServer(lambda request: [b"HTTP/1.1 400 Bad\r\nContent-Length: 8\r\n\r\ntoo long"])
    (result,) = run(server, lens=(4,), requests=2)["results"]
    assert result["error_messages"] == {"HTTP 400: too long": 2}
    assert result["ttft_s"] is None
    assert result["tokens_per_s"] == {"input": 0.0, "output": 0.0}


def test_as_many_requests_are_in_flight_as_asked_for() -> None:
    """The server answers nobody before three requests are there."""
    server = ScriptedServer(lambda request: answer(1), num_meeting=3)
    (result,) = run(server, lens=(4,), out=1, concurrency=3, requests=6)["results"]
    assert (result["completed"], result["errors"]) == (6, 0)


# Prompts and settings


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    settings = ServeSettings("http://host", shared_prefix=10, seed=1)
    long, short = make_prompts(settings, 40), make_prompts(settings, 8)
    first, second, brief = next(long), next(long), next(short)
    assert [len(first), len(second), len(brief)] == [40, 40, 8]
    assert first[:10] == second[:10] and first[:7] == brief[:7]
    assert not set(first[10:]) & set(second[10:])
    assert next(make_prompts(settings, 40)) == first
    assert next(make_prompts(ServeSettings("http://host", shared_prefix=10, seed=2), 40))[:10] != first[:10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lens": ()}, "at least 1 token each"),
        ({"lens": (16, 0)}, r"at least 1 token each, got \[16, 0\]"),
        ({"lens": (16, 16)}, "must differ"),
        ({"out": 0}, "out must be at least 1, got 0"),
        ({"concurrency": 4, "requests": 3}, "requests must be at least concurrency 4, got 3"),
        ({"shared_prefix": -1}, "shared_prefix must be at least 0, got -1"),
        ({"vocab": 100}, "vocab must be above 100, got 100"),
        ({"timeout_s": 0.0}, "timeout must be above 0 s, got 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_value_and_limit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings("http://host", **settings)


# The command


def test_the_command_prints_tables_and_writes_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, png_path = tmp_path / "out.json", tmp_path / "out.png"
    with ScriptedServer(lambda request: answer(2, cached_tokens=0)).running() as server:
        options = ["--lens", "3,5", "--out", "2", "--requests", "2", "--seed", "7", "--json", str(json_path), "--plot", str(png_path)]
        assert bench.main(["serve", "--url", server.url, *options]) == 0
    printed = capsys.readouterr().out
    for word in ("scripted", "TTFT", "ITL", "hand-off", "output tok/s", "seed 7"):
        assert word in printed
    measured = json.loads(json_path.read_text())
    assert set(measured) == {"schema_version", "benchmark", "model", "settings", "results"}
    assert measured["settings"]["seed"] == 7
    assert set(measured["results"][0]) == {
        "prompt_tokens", "shared_prefix_tokens", "output_tokens", "concurrency", "requests", "completed", "errors", "error_messages",
        "duration_s", "ttft_s", "itl_s", "handoff_s", "e2e_s", "tokens_per_s", "cached_tokens", "samples",
    }  # fmt: skip
    assert png_path.read_bytes().startswith(b"\x89PNG")


def test_a_failed_request_shows_in_output_and_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with ScriptedServer(lambda request: [b"HTTP/1.1 503 No\r\nContent-Length: 6\r\n\r\n[gone]"]).running() as server:
        assert bench.main(["serve", "--url", server.url, "--lens", "3", "--requests", "2", "--plot", str(tmp_path / "out.png")]) == 1
    assert "3 prompt tokens: 2 x HTTP 503: [gone]" in capsys.readouterr().out


def test_two_runs_without_a_seed_send_different_prompts() -> None:
    with ScriptedServer(lambda request: answer(1)).running() as server:
        for _ in range(2):
            bench.main(["serve", "--url", server.url, "--lens", "6", "--out", "1", "--requests", "1"])
    prompts = [tuple(request["prompt"]) for request in server.requests]
    assert len(set(prompts)) == 4


def test_a_server_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as endpoint:
        pass
    assert bench.main(["serve", "--url", f"http://127.0.0.1:{endpoint.port}"]) == 1
    assert f"http://127.0.0.1:{endpoint.port}: connection failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--url", "nowhere"], "a server's URL looks like http://127.0.0.1:8000, got 'nowhere'"),
        (["serve", "--url", "http://host", "--lens", "a,b"], "prompt lengths look like 128,512, got 'a,b'"),
        (["serve", "--url", "http://host", "--json", "/no/such/folder/out.json"], "cannot write /no/such/folder/out.json"),
        (["serve", "--url", "http://host", "--requests", "0"], "requests must be at least 1, got 0"),
        (["ceilings", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        ([], "COMMAND"),
    ],
)
def test_a_bad_command_line_ends_with_status_2_and_the_reason(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench.main(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["serve", "--url", "http://host", "--plot", "out.png"])
    assert "pip install 'pdjax[bench]'" in capsys.readouterr().err


def test_serve_does_not_load_jax() -> None:
    check = "import sys, pdjax.bench; sys.exit('jax' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# Ceilings


def test_ceilings_are_the_ones_worked_out_by_hand() -> None:
    """Three timed runs each, of 1, 2 and 4 seconds: best 1, median 2."""
    clock = readings(*[time_s for _ in range(3) for time_s in (0.0, 1.0, 1.0, 3.0, 3.0, 7.0)])
    steps: list[str] = []
    settings = ceilings.CeilingSettings(matmul_size=100, read_bytes=8000, matvec_rows=20, repeats=3)
    measured = ceilings.run(settings, steps.append, clock)
    assert steps == ["matrix product", "sum", "matrix-vector product"]
    assert measured["matmul_gflop_per_s"] == {"best": pytest.approx(2e-3), "median": pytest.approx(1e-3)}
    assert measured["read_sum_gb_per_s"] == {"best": pytest.approx(8e-6), "median": pytest.approx(4e-6)}
    assert measured["read_matvec_gb_per_s"] == {"best": pytest.approx(8e-6), "median": pytest.approx(4e-6)}
    assert measured["device"]["platform"] in ("cpu", "gpu", "tpu")


def test_floors_follow_from_the_ceilings() -> None:
    assert ceilings.floors(gflop_per_s=108.544, gb_per_s=13.5) == {
        "prefill_512_tokens_s": pytest.approx(1.0),
        "read_540_mb_s": pytest.approx(0.04),
    }


def test_the_ceilings_command_prints_rates_floors_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ceilings.CeilingSettings(matmul_size=64, read_bytes=40000, matvec_rows=10, repeats=2)
    monkeypatch.setattr(ceilings, "CeilingSettings", lambda repeats: small)
    assert bench.main(["ceilings", "--repeats", "2", "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "matrix product 64^3" in printed and "512 tokens at 0.212 GFLOP each" in printed and "at 60 % of it" in printed
    measured = json.loads((tmp_path / "out.json").read_text())
    assert set(measured) == {
        "schema_version", "benchmark", "device", "settings", "matmul_gflop_per_s", "read_sum_gb_per_s", "read_matvec_gb_per_s", "floors"
    }  # fmt: skip
