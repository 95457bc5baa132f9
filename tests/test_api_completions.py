"""/v1/completions through the openai client, against hand-checked answers of a scripted backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_backend import EOS, HELLO, MODEL, TURN, Served, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


def streamed_text(stream) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_a_text_prompt_is_answered_up_to_the_end_token(served):
    answer = served.client().completions.create(model=MODEL, prompt="Hi")
    choice = answer.choices[0]
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert (choice.index, choice.text, choice.finish_reason, choice.stop_reason) == (0, "abcdef", "stop", None)
    assert served.backend.calls[0].prompt == [72, 105]


def test_the_end_token_counts_in_the_usage_but_not_in_the_text(served):
    usage = served.client().completions.create(model=MODEL, prompt="Hi").usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 7, 9)


def test_cached_tokens_are_reported(served):
    served.backend.cached_tokens = 1
    usage = served.client().completions.create(model=MODEL, prompt="Hi", n=2).usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (2, 1)


@pytest.mark.parametrize(
    "prompt, ids",
    [
        ("Hi", [[72, 105]]),
        (["A", "BC"], [[65], [66, 67]]),
        ([72, 105], [[72, 105]]),
        ([[65], [HELLO, 67]], [[65], [HELLO, 67]]),
        ("<turn>A", [[TURN, 65]]),
        ("ä", [[0xC3, 0xA4]]),
    ],
)
def test_every_form_of_prompt_reaches_the_backend_as_token_ids(served, prompt, ids):
    answer = served.client().completions.create(model=MODEL, prompt=prompt)
    assert sorted(call.prompt for call in served.backend.calls) == sorted(ids)
    assert [choice.index for choice in answer.choices] == list(range(len(ids)))


def test_each_prompt_of_a_list_gets_its_own_answer(served):
    served.backend.script = lambda prompt: [*prompt, *prompt, EOS]
    answer = served.client().completions.create(model=MODEL, prompt=["A", "BC"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "AA"), (1, "AA"), (2, "BCBC"), (3, "BCBC")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2 * 3 + 2 * 5)


def test_streamed_choices_are_told_apart_by_index(served):
    served.backend.script = lambda prompt: [*prompt, *prompt, EOS]
    stream = served.client().completions.create(model=MODEL, prompt=["A", "BC"], n=2, stream=True)
    assert streamed_text(stream) == {0: "AA", 1: "AA", 2: "BCBC", 3: "BCBC"}


def test_choices_of_one_request_run_at_the_same_time(served):
    served.backend.hold_at = 1
    with served.client().completions.create(model=MODEL, prompt=["A", "B"], n=2, stream=True):
        served.backend.wait_until_open(4)


def test_sequences_have_ids_of_their_own(served):
    answer = served.client().completions.create(model=MODEL, prompt="A", n=3)
    assert sorted(call.request_id for call in served.backend.calls) == [f"{answer.id}-{i}" for i in range(3)]


def test_every_sampling_field_reaches_the_backend(served):
    served.client().completions.create(
        model=MODEL,
        prompt="A",
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias={"65": 2, "66": -100.0},
        seed=17,
        extra_body={"top_k": 3, "min_p": 0.125, "repetition_penalty": 1.25, "min_tokens": 4, "stop_token_ids": [66]},
    )
    sampling = served.backend.calls[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (9, 4, 0.5, 0.25)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.125, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5)
    assert (sampling.logit_bias, sampling.seed) == ({65: 2.0, 66: -100.0}, 17)
    assert (sampling.stop_token_ids, sampling.logprobs) == ((EOS, 66), None)


def test_a_seed_is_counted_up_over_the_choices_of_a_prompt(served):
    served.client().completions.create(model=MODEL, prompt=["A", "B"], n=2, seed=5)
    assert sorted((call.prompt[0], call.sampling.seed) for call in served.backend.calls) == [(65, 5), (65, 6), (66, 5), (66, 6)]


def test_without_a_seed_every_sequence_gets_another_one(served):
    served.client().completions.create(model=MODEL, prompt="A", n=8)
    assert len({call.sampling.seed for call in served.backend.calls}) == 8


def test_the_default_of_max_tokens_is_sixteen(served):
    served.backend.script = lambda prompt: [65] * 100
    answer = served.client().completions.create(model=MODEL, prompt="A")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("A" * 16, "length")


def test_an_ignored_end_token_does_not_end_the_answer(served):
    served.backend.script = lambda prompt: [65, EOS, 66, 67, 68]
    answer = served.client().completions.create(model=MODEL, prompt="A", max_tokens=4, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("ABC", "length", 4)


def test_a_stop_token_of_the_client_is_named_and_not_shown(served):
    answer = served.client().completions.create(model=MODEL, prompt="A", extra_body={"stop_token_ids": [99]})
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason, answer.usage.completion_tokens) == ("ab", "stop", 99, 3)


@pytest.mark.parametrize(
    "stop, text, reason, tokens",
    [("d", "abc", "d", 4), (["zz", "cd"], "ab", "cd", 4), ("a", "", "a", 1), (["f", "ef"], "abcd", "ef", 6), ("fx", "abcdef", None, 7)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_never_shown(served, stop, text, reason, tokens, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = served.client().completions.create(model=MODEL, prompt="A", stop=stop, stream=stream, **options)
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == text
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", reason)
    assert chunks[-1].usage.completion_tokens == tokens


def test_a_stop_string_stops_the_work_before_the_answer_is_complete(served):
    served.backend.hold_at = 3
    answer = served.client().completions.create(model=MODEL, prompt="A", stop="c")
    assert answer.choices[0].text == "ab"
    served.backend.wait_until_open(0)


def test_cached_tokens_are_unknown_when_a_stop_string_came_first(served):
    usage = served.client().completions.create(model=MODEL, prompt="A", stop="c").usage
    assert usage.prompt_tokens_details.cached_tokens is None


@pytest.mark.parametrize("prompt, echoed", [("Hi", "Hi"), ([HELLO, 0xC3, 0xA4], "hello ä")])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(served, prompt, echoed, stream):
    answer = served.client().completions.create(model=MODEL, prompt=prompt, echo=True, n=2, stream=stream)
    texts = streamed_text(answer) if stream else {choice.index: choice.text for choice in answer.choices}
    assert texts == {0: echoed + "abcdef", 1: echoed + "abcdef"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_emoji_split_over_tokens_arrives_whole(served, stream):
    served.backend.script = lambda prompt: [*"x😀é".encode(), EOS]
    answer = served.client().completions.create(model=MODEL, prompt="A", stream=stream)
    chunks = [c.text for chunk in answer for c in chunk.choices] if stream else [answer.choices[0].text]
    assert "".join(chunks) == "x😀é"
    assert all("\ufffd" not in text for text in chunks)


def test_half_a_character_at_the_length_limit_is_shown_as_a_replacement(served):
    served.backend.script = lambda prompt: [*"x😀".encode()]
    answer = served.client().completions.create(model=MODEL, prompt="A", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x\ufffd", "length")


def test_best_of_is_accepted_where_it_changes_nothing(served):
    assert len(served.client().completions.create(model=MODEL, prompt="A", n=2, best_of=2).choices) == 2


def test_logprobs_have_one_entry_a_token_and_name_the_alternatives(served):
    answer = served.client().completions.create(model=MODEL, prompt="A", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["a", "b"], [-0.125, -0.25], [0, 1])
    assert logprobs.top_logprobs == [{"a": -0.125, "`": -0.375}, {"b": -0.25, "a": -0.5}]


def test_logprobs_zero_gives_the_chosen_tokens_alone(served):
    answer = served.client().completions.create(model=MODEL, prompt="A", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert (len(logprobs.tokens), logprobs.tokens[-1], logprobs.top_logprobs) == (7, "<end>", None)
    assert answer.usage.completion_tokens == 7


def test_parts_of_characters_are_spelled_as_bytes_in_logprobs(served):
    served.backend.script = lambda prompt: [*"éa".encode(), EOS]
    logprobs = served.client().completions.create(model=MODEL, prompt="A", logprobs=0).choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "a", "<end>"]
    assert logprobs.text_offset == [0, 0, 1, 2]


def test_streamed_logprobs_equal_the_whole_ones(served):
    served.backend.script = lambda prompt: [HELLO, *"é!".encode(), EOS]
    whole = served.client().completions.create(model=MODEL, prompt="A", logprobs=2).choices[0].logprobs
    parts = [
        chunk.choices[0].logprobs
        for chunk in served.client().completions.create(model=MODEL, prompt="A", logprobs=2, stream=True)
        if chunk.choices[0].logprobs is not None
    ]
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [top for part in parts for top in part.top_logprobs] == whole.top_logprobs


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(served):
    chunks = list(
        served.client().completions.create(model=MODEL, prompt="Hi", n=2, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens, chunks[-1].usage.total_tokens) == (2, 14, 16)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])


def test_each_choice_of_a_stream_ends_with_exactly_one_finish_reason(served):
    chunks = list(served.client().completions.create(model=MODEL, prompt="Hi", n=3, stream=True))
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason == "stop"]
    assert sorted(finished) == [0, 1, 2]
