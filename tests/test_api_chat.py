"""/v1/chat/completions through the openai client, and the tokenizer's endpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_backend import EOS, HELLO, MODEL, TURN, Served, serve

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


def prompt_of(served: Served) -> str:
    ids = served.backend.calls[-1].prompt
    return "".join("<turn>" if token == TURN else chr(token) for token in ids)


def test_a_conversation_is_rendered_and_answered(served):
    answer = served.client().chat.completions.create(model=MODEL, messages=USER)
    choice = answer.choices[0]
    assert prompt_of(served) == "<turn>user:Hi<turn>"
    assert (answer.object, answer.id[:9], choice.message.role, choice.message.content) == (
        "chat.completion",
        "chatcmpl-",
        "assistant",
        "abcdef",
    )
    assert (choice.finish_reason, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("stop", 9, 7)


@pytest.mark.parametrize(
    "messages, rendered",
    [
        ([{"role": "developer", "content": "A"}, *USER], "<turn>system:A<turn>user:Hi<turn>"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "<turn>user:a\nb<turn>"),
        ([*USER, {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None}], "<turn>user:Hi<turn>assistant:x<turn>"),
    ],
)
def test_messages_of_every_accepted_form_are_rendered(served, messages, rendered):
    served.client().chat.completions.create(model=MODEL, messages=messages)
    assert prompt_of(served) == rendered


def test_the_first_chunk_of_each_choice_carries_the_role(served):
    first: dict[int, str] = {}
    texts = {0: "", 1: ""}
    for chunk in served.client().chat.completions.create(model=MODEL, messages=USER, n=2, stream=True):
        choice = chunk.choices[0]
        assert (choice.delta.role == "assistant") == (choice.index not in first)
        first.setdefault(choice.index, choice.delta.role)
        texts[choice.index] += choice.delta.content or ""
    assert (first, texts) == ({0: "assistant", 1: "assistant"}, {0: "abcdef", 1: "abcdef"})


def test_the_last_chunk_of_a_stream_says_why_it_ended(served):
    chunks = list(served.client().chat.completions.create(model=MODEL, messages=USER, stream=True, max_tokens=2))
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}])
def test_both_names_of_the_token_limit_mean_the_same(served, limits):
    answer = served.client().chat.completions.create(model=MODEL, messages=USER, **limits)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")


def test_without_a_token_limit_the_servers_default_holds(served):
    served.backend.script = lambda prompt: [65] * 99
    answer = served.client().chat.completions.create(model=MODEL, messages=USER)
    assert answer.usage.completion_tokens == 20


def test_the_default_token_limit_is_clipped_to_what_the_context_has_left(served):
    served.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 41}])
    call = served.backend.calls[0]
    assert (len(call.prompt), call.sampling.max_tokens) == (48, 16)


def test_an_answer_of_one_end_token_is_an_empty_text(served):
    served.backend.script = lambda prompt: [EOS]
    answer = served.client().chat.completions.create(model=MODEL, messages=USER)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("", "stop", 1)


def test_logprobs_come_with_bytes_and_alternatives(served):
    served.backend.script = lambda prompt: [HELLO, 0xC3, EOS]
    answer = served.client().chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in content] == [("hello ", -0.125), ("bytes:\\xc3", -0.25), ("<end>", -0.375)]
    assert (content[0].bytes, content[1].bytes) == (list(b"hello "), [0xC3])
    assert [(top.token, top.logprob, top.bytes) for top in content[1].top_logprobs] == [
        ("bytes:\\xc3", -0.25, [0xC3]),
        ("bytes:\\xc2", -0.5, [0xC2]),
    ]


@pytest.mark.parametrize("options, num_top", [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)])
def test_streamed_logprobs_have_one_entry_a_token(served, options, num_top):
    chunks = served.client().chat.completions.create(model=MODEL, messages=USER, stream=True, **options)
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == [*"abcdef", "<end>"]
    assert {len(entry.top_logprobs) for entry in entries} == {num_top}


def test_no_logprobs_are_given_unasked(served):
    answer = served.client().chat.completions.create(model=MODEL, messages=USER, logprobs=False, top_logprobs=0)
    assert answer.choices[0].logprobs is None
    assert served.backend.calls[0].sampling.logprobs is None


def test_usage_comes_last_in_a_stream_that_asked_for_it(served):
    served.backend.cached_tokens = 4
    options = {"include_usage": True, "include_obfuscation": False}
    chunks = list(served.client().chat.completions.create(model=MODEL, messages=USER, stream=True, stream_options=options))
    usage = chunks[-1].usage
    assert (chunks[-1].choices, usage.prompt_tokens, usage.completion_tokens) == ([], 9, 7)
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_fields_without_effect_and_defaults_of_unsupported_ones_are_accepted(served):
    served.client().chat.completions.create(
        model=MODEL,
        messages=USER,
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="flex",
        safety_identifier="s",
        prompt_cache_key="p",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        audio=None,
        extra_body={"functions": None, "skip_special_tokens": True},
    )
    assert len(served.backend.calls) == 1


def test_a_request_may_say_null_for_every_optional_field(served):
    names = ("n", "stop", "max_tokens", "temperature", "seed", "logprobs", "top_logprobs", "stream", "stream_options", "tools")
    body = {"model": MODEL, "messages": USER} | dict.fromkeys(names)
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "body, tokens",
    [
        ({"prompt": "<turn>é"}, [TURN, 0xC3, 0xA9]),
        ({"messages": [{"role": "user", "content": "A"}]}, [TURN, *b"user:A", TURN]),
        ({"messages": [{"role": "user", "content": "A"}], "add_generation_prompt": False, "model": MODEL}, [TURN, *b"user:A"]),
    ],
)
def test_tokenize_gives_what_a_request_would_be_computed_from(served, body, tokens):
    answer = served.http.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()) == (200, {"tokens": tokens, "count": len(tokens), "max_model_len": 64})


def test_detokenize_inverts_tokenize(served):
    answer = served.http.post("/detokenize", json={"tokens": [TURN, HELLO, 0xC3, 0xA9]})
    assert (answer.status_code, answer.json()) == (200, {"prompt": "<turn>hello é"})
