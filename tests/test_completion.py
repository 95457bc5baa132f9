"""Answers of the Python API: their times, how notebooks show them, and the picture of their timeline."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdjax.api.completion import MAX_SHOWN_ANSWERS, MAX_SHOWN_CHARS, MAX_SHOWN_TOKENS, Completion, Completions
from pdjax.observe.timeline_picture import TimelinePicture
from pdjax.protocol import TokenOut
from tests.test_timeline_view import noted, picture


def completion(
    pieces: list[str], times_s: list[float], logprobs: list[float | None] | None = None, stop_reason: int | str | None = None
) -> Completion:
    logprobs = logprobs or [None] * len(pieces)
    return Completion(
        request_id="llm-0-x-0",
        prompt_token_ids=[5, 6, 7],
        text="".join(pieces),
        tokens=[TokenOut(i, 100 + i, logprob) for i, logprob in enumerate(logprobs)],
        text_offsets=[len("".join(pieces[:i])) for i in range(len(pieces))],
        token_times_s=times_s,
        finish_reason="length" if stop_reason is None else "stop",
        stop_reason=stop_reason,
        cached_tokens=2,
        prompt_logprobs=[],
    )


class Cells(HTMLParser):
    """The text of every table cell, row by row; fails on tags that do not close in order."""

    def __init__(self, html: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"{self._open} are not closed"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


def test_times_are_told_where_there_are_tokens_to_time() -> None:
    three = completion(["a", "b", "c"], [0.5, 0.6, 0.9])
    assert (three.ttft_s, three.itl_s) == (0.5, pytest.approx(0.2))
    assert (completion(["a"], [0.5]).ttft_s, completion(["a"], [0.5]).itl_s) == (0.5, None)
    assert (completion([], []).ttft_s, completion([], []).itl_s) == (None, None)


def test_a_table_has_a_row_a_token_with_what_is_known_of_it() -> None:
    shown = Cells(completion([" one", "\ntwo"], [0.25, 0.275], [-0.5, -2.0])._repr_html_())
    assert shown.rows == [
        ["", "token", "id", "log probability", "after, ms", "gap, ms"],
        ["0", " one", "100", "-0.500", "250.0", ""],
        ["1", "\\ntwo", "101", "-2.000", "275.0", "25.0"],
    ]
    assert "2 tokens, ended by length, prompt of 3 tokens (2 cached), first token after 250.0 ms, then 25.0 ms a token" in shown.text
    assert "log probability" not in Cells(completion(["a"], [0.1])._repr_html_()).text


def test_the_token_that_ends_an_answer_without_text_has_an_empty_cell() -> None:
    shown = Cells(completion(["yes", ""], [0.1, 0.2])._repr_html_())
    assert [row[1] for row in shown.rows] == ["token", "yes", ""]


def test_whatever_a_model_says_is_shown_as_text() -> None:
    nasty = '<script>alert("&")</script>'
    html = (
        completion([nasty, "</td>"], [0.1, 0.2], stop_reason="<b>")._repr_html_()
        + Completions([completion([nasty], [0.1], stop_reason="<b>")])._repr_html_()
    )
    assert "<script" not in html and "<b>" not in html
    shown = Cells(html)
    assert nasty in shown.text and 'stop "<b>"' in shown.text


def test_what_is_shown_of_long_answers_is_bounded_and_says_so() -> None:
    many = completion(["word "] * 10_000, [0.1 * i for i in range(10_000)])
    html = many._repr_html_()
    assert len(html) < 4 * MAX_SHOWN_CHARS + 300 * MAX_SHOWN_TOKENS
    assert len(Cells(html).rows) == MAX_SHOWN_TOKENS + 1
    assert f"and {10_000 - MAX_SHOWN_TOKENS} more" in html
    answers = Completions([many] * 100)._repr_html_()
    assert len(Cells(answers).rows) == MAX_SHOWN_ANSWERS + 1 and "and 68 more" in answers
    assert len(answers) < 1_000 * MAX_SHOWN_ANSWERS


def test_several_answers_are_a_list_that_shows_a_row_each() -> None:
    answers = Completions([completion(["a", "b"], [0.1, 0.12]), completion([], [])])
    assert isinstance(answers, list) and [each.text for each in answers] == ["ab", ""]
    assert Cells(answers._repr_html_()).rows[1:] == [
        ["0", "3", "2", "ab", "2", "length", "100.0", "20.0"],
        ["1", "3", "2", "", "0", "length", "", ""],
    ]


def test_the_picture_of_a_timeline_has_a_row_a_track_and_a_bar_for_every_stage() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = TimelinePicture(picture(noted())).plot(figure.subplots())
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        "router",
        "router | as the client sees it",
        "prefill p:1 | stages",
        "prefill p:1 | chunks",
        "prefill p:1 | sends",
        "KV transfer | sent before a step",
        "KV transfer | sent before a step (2)",
        "KV transfer | sent behind the last chunk",
        "decode d:1 | stages",
        "decode d:1 | receives",
    ]
    forward = labels.index("prefill p:1 | chunks")
    [chunk] = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == forward]
    assert (chunk.get_x(), chunk.get_width()) == (5_000, 10_000)
    assert {"forward", "transfer", "to first token"} <= {text.get_text() for text in axes.texts}


def test_a_picture_ends_where_it_is_told_to() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = TimelinePicture(picture(noted())).plot(figure.subplots(), end_ms=8_000)
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == 8_000
    assert axes.get_xlim()[1] == pytest.approx(8_080)


def test_a_saved_trace_is_the_one_that_the_router_would_give(tmp_path: Path) -> None:
    seen = TimelinePicture(picture(noted()))
    seen.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"].count("forward") == 1
