"""What running systems answer: the reference's tokens, whoever computes them and however busy they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from tests.goldens import Golden, load_goldens
from tests.live import WINDOW, Answer, Client, check_idle, check_pages_sent, pages_sent, vocabulary

pytestmark = pytest.mark.live

GOLDENS = load_goldens()
PAGE = 16
CHUNK = 256
LOGPROB_TOLERANCE = 2e-3
"""The reference's log probabilities are rounded, and it adds up in another order."""

T = TypeVar("T")


def at_once(calls: Sequence[Callable[[], T]], window: int = 2 * WINDOW) -> list[T]:
    with ThreadPoolExecutor(window) as pool:
        return list(pool.map(lambda call: call(), calls))


def ask(client: Client, golden: Golden, **fields: Any) -> Answer:
    """The golden's own prompt: a chat where it is one, token ids where it is text."""
    if golden.messages is None:
        return client.complete(golden.prompt_ids, max_tokens=24, **fields)
    [answer] = client.choices(messages=golden.messages, max_tokens=24, **fields)
    return answer


def check_golden(client: Client, golden: Golden) -> None:
    answer = client.complete(golden.prompt_ids, max_tokens=24, logprobs=5)
    assert answer.ids == golden.output_ids, golden.name
    assert answer.logprobs is not None
    best = {vocabulary().id_of(name): value for name, value in answer.logprobs["top_logprobs"][0].items()}
    assert best == pytest.approx(dict(golden.first_top5), abs=LOGPROB_TOLERANCE), golden.name


def test_every_golden_comes_out_of_prefill_and_decode_token_by_token(pair: Client) -> None:
    at_once([lambda golden=golden: check_golden(pair, golden) for golden in GOLDENS])


def test_goldens_come_out_of_a_unified_worker_token_by_token(unified: Client) -> None:
    at_once([lambda golden=golden: check_golden(unified, golden) for golden in (*GOLDENS[:-1:4], GOLDENS[-1])])


def test_repeated_goldens_do_not_drift_while_many_run_at_once(pair: Client) -> None:
    """Row 7 in short: sequences share steps, slots, metadata rows and cached pages in ever new ways."""
    short = [golden for golden in GOLDENS if len(golden.prompt_ids) <= 64]
    rounds = random.Random(7).sample(short * 3, 36)
    for golden, answer in zip(rounds, at_once([lambda golden=golden: ask(pair, golden) for golden in rounds]), strict=True):
        assert answer.text == vocabulary().text(golden.output_ids), golden.name
        assert answer.usage["completion_tokens"] == len(golden.output_ids), golden.name
        assert answer.usage["prompt_tokens"] == len(golden.prompt_ids), golden.name
        assert answer.finish_reason == ("stop" if golden.output_ids[-1] == 2 else "length"), golden.name


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + PAGE])
def test_prompts_of_any_length_are_answered_alike_by_both_systems(length: int, pair: Client, unified: Client) -> None:
    """Around the borders of pages, of chunks of 256 tokens in the pair and of 64 in the unified worker."""
    prompt = next(golden for golden in GOLDENS if golden.name == "long").prompt_ids[-length:]
    assert pair.ids(prompt, 6) == unified.ids(prompt, 6)


def draw_tokens(num_tokens: int, seed: int) -> list[int]:
    """Random tokens, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(num_tokens)]


def test_a_warm_cache_changes_no_token_and_saves_computing_and_moving(pair: Client) -> None:
    prompt = draw_tokens(6 * PAGE + 8, 1)
    half = prompt[: 3 * PAGE] + draw_tokens(3 * PAGE, 2)
    check_idle(pair)
    before = pages_sent(pair)
    cold = pair.complete(prompt, max_tokens=6, logprobs=0)
    assert cold.cached_tokens == 0
    check_pages_sent(pair, before + 7)
    warm = pair.complete(prompt, max_tokens=6, logprobs=0)
    assert (warm.ids, warm.cached_tokens) == (cold.ids, 6 * PAGE)
    check_pages_sent(pair, before + 8)
    shared = pair.complete(half, max_tokens=6, logprobs=0)
    assert shared.cached_tokens == 3 * PAGE
    check_pages_sent(pair, before + 11)
    assert shared.ids == pair.ids(half, 6)


def test_an_extension_by_the_answer_itself_is_answered_as_the_long_answer_was(pair: Client) -> None:
    prompt = draw_tokens(2 * PAGE - 3, 3)
    whole = pair.ids(prompt, 12, ignore_eos=True)
    for given in (1, 2, 3, 4, 8):
        longer = pair.complete(prompt + whole[:given], max_tokens=12 - given, logprobs=0, ignore_eos=True)
        assert longer.ids == whole[given:]
        assert longer.cached_tokens <= len(prompt) + given - 1


def test_a_prompt_of_whole_pages_that_decode_holds_already_moves_nothing(pair: Client) -> None:
    prompt = draw_tokens(4 * PAGE, 4)
    check_idle(pair)
    before = pages_sent(pair)
    first = pair.ids(prompt, 5)
    check_pages_sent(pair, before + 4)
    assert pair.ids(prompt, 5) == first
    check_pages_sent(pair, before + 4)


DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "seed": 12},
    {"temperature": 1.3, "top_k": 20, "seed": 13},
    {"temperature": 1.0, "min_p": 0.05, "seed": 14},
    {"temperature": 0.7, "frequency_penalty": 0.7, "presence_penalty": 0.4, "seed": 15},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 2.0},
    {"temperature": 0, "logit_bias": {"28": -100, "30": -100, "198": 3}},
    {"temperature": 1.0, "seed": 16, "logit_bias": {"28": 5.0}, "presence_penalty": 1.5},
]


def test_sampled_answers_are_the_same_alone_in_a_batch_and_through_either_system(pair: Client, unified: Client) -> None:
    """Penalties too: prefill counts the prompt for the first token, decode the prompt and that token for the next ones."""
    prompt = GOLDENS[0].prompt_ids

    def ask_all(client: Client) -> list[Callable[[], list[int]]]:
        return [lambda fields=fields: client.ids(prompt, 10, ignore_eos=True, **fields) for fields in DRAWN]

    together = at_once(ask_all(pair))
    assert at_once(ask_all(unified)) == together
    assert [ask_one() for ask_one in ask_all(pair)] == together
    assert len({tuple(ids) for ids in together}) > len(DRAWN) / 2


def test_each_of_several_choices_has_a_seed_of_its_own(pair: Client) -> None:
    fields = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    prompt = GOLDENS[0].prompt_ids
    choices = [answer.ids for answer in pair.choices(prompt=prompt, n=3, seed=5, **fields)]
    assert choices == [pair.complete(prompt, seed=seed, **fields).ids for seed in (5, 6, 7)]
    assert len({tuple(ids or []) for ids in choices}) == 3


def test_two_prompts_in_one_call_are_answered_apart(pair: Client) -> None:
    first, second = GOLDENS[0], GOLDENS[1]
    answers = pair.choices(prompt=[first.prompt_ids, second.prompt_ids], max_tokens=24, logprobs=0)
    assert [answer.ids for answer in answers] == [first.output_ids, second.output_ids]


CAPITAL = GOLDENS[0]
EOS = 2


@pytest.mark.parametrize("system", ["pair", "unified"])
def test_an_answer_ends_where_its_first_token_ends_it(system: str, request: pytest.FixtureRequest) -> None:
    """Row 5: the first token comes from prefill, and decode's reservation is let go without a step."""
    client: Client = request.getfixturevalue(system)
    prompt, [first, second] = CAPITAL.prompt_ids, CAPITAL.output_ids[:2]

    def ask_for(**fields: Any) -> tuple[list[int] | None, str, str | None]:
        answer = client.complete(prompt, logprobs=0, **{"max_tokens": 6, **fields})
        assert answer.usage["completion_tokens"] == len(answer.ids or [])
        return answer.ids, answer.text, answer.finish_reason

    assert ask_for(max_tokens=1) == ([first], "The", "length")
    assert ask_for(max_tokens=2) == ([first, second], "The capital", "length")
    assert ask_for(logit_bias={EOS: 100}) == ([EOS], "", "stop")
    assert ask_for(stop_token_ids=[first]) == ([first], "", "stop")
    assert ask_for(stop_token_ids=[second]) == ([first, second], "The", "stop")
    assert ask_for(stop="The") == ([first], "", "stop")
    assert ask_for(stop="he cap") == ([first, second], "T", "stop")
    assert ask_for(max_tokens=1, logit_bias={EOS: 100}, ignore_eos=True)[::2] == ([EOS], "length")
    ids, _, reason = ask_for(max_tokens=12, ignore_eos=True)
    assert (ids and ids[:8], len(ids or []), reason) == (CAPITAL.output_ids, 12, "length")
    ids, _, reason = ask_for(max_tokens=12, min_tokens=10)
    assert ids and len(ids) >= 10 and ids[:7] == CAPITAL.output_ids[:7]


def test_log_probabilities_belong_to_their_own_token_whatever_the_neighbours_do(pair: Client) -> None:
    golden = GOLDENS[1]
    alone = pair.complete(golden.prompt_ids, max_tokens=12, logprobs=3)
    assert alone.logprobs is not None
    assert alone.logprobs["token_logprobs"][0] == pytest.approx(golden.first_top5[0][1], abs=LOGPROB_TOLERANCE)

    def neighbour(i: int) -> Callable[[], Answer]:
        end = [{"max_tokens": 1}, {"logit_bias": {EOS: 100}}, {"stop": "e"}, {}][i % 4]
        return lambda: pair.complete(GOLDENS[2 + i].prompt_ids, **{"max_tokens": 12, **end})

    calls = [neighbour(i) for i in range(12)]
    calls[6:6] = [lambda: pair.complete(golden.prompt_ids, max_tokens=12, logprobs=3)] * 2
    for answer in at_once(calls)[6:8]:
        assert answer.ids == alone.ids == golden.output_ids[:12]
        assert answer.logprobs is not None
        assert len(answer.logprobs["token_logprobs"]) == len(answer.logprobs["top_logprobs"]) == 12
        assert answer.logprobs["token_logprobs"] == pytest.approx(alone.logprobs["token_logprobs"], abs=LOGPROB_TOLERANCE)
        for chosen, best in zip(answer.logprobs["token_logprobs"], answer.logprobs["top_logprobs"], strict=True):
            assert chosen == max(best.values())  # greedy


def test_a_stream_gives_the_tokens_of_the_whole_answer(pair: Client) -> None:
    for golden in (CAPITAL, GOLDENS[5]):
        assert list(pair.stream(golden.prompt_ids, 24)) == golden.output_ids


def echoed(client: Client, prompt: list[int], **fields: Any) -> dict[str, list[Any]]:
    """The log probabilities of an answer that echoes its prompt, as /v1/completions gives them."""
    answer = client.complete(prompt, echo=True, logprobs=5, **fields)
    assert answer.logprobs is not None
    return answer.logprobs


@pytest.mark.parametrize("length", [1, 2, PAGE, CHUNK + PAGE + 1])
def test_both_systems_say_the_same_of_a_prompt(length: int, pair: Client, unified: Client) -> None:
    """Chunks of 256 tokens in the pair and of 64 in the unified worker; the second time the prompt is cached, and computed all the same."""
    prompt = next(golden for golden in GOLDENS if golden.name == "long").prompt_ids[-length:]
    for _ in range(2):
        ours, theirs = (echoed(client, prompt, max_tokens=0) for client in (pair, unified))
        assert ours["tokens"] == theirs["tokens"] and len(ours["tokens"]) == length
        assert ours["token_logprobs"][0] is None and ours["top_logprobs"][0] is None
        assert ours["token_logprobs"][1:] == pytest.approx(theirs["token_logprobs"][1:], abs=LOGPROB_TOLERANCE)
        for mine, other in zip(ours["top_logprobs"][1:], theirs["top_logprobs"][1:], strict=True):
            assert sorted(mine.values()) == pytest.approx(sorted(other.values()), abs=LOGPROB_TOLERANCE)


def check_scored_as_given(client: Client, golden: Golden) -> None:
    answer = client.complete(golden.prompt_ids, max_tokens=8, logprobs=0)
    assert answer.ids == golden.output_ids[:8] and answer.logprobs is not None
    scored = echoed(client, golden.prompt_ids + golden.output_ids[:8], max_tokens=1)
    tail = scored["token_logprobs"][len(golden.prompt_ids) : -1]
    assert tail == pytest.approx(answer.logprobs["token_logprobs"], abs=LOGPROB_TOLERANCE), golden.name


def test_an_answer_scored_as_a_prompt_has_the_log_probabilities_that_it_was_given_with(pair: Client, unified: Client) -> None:
    """All at once, so that prompts which are scored share steps with others which are not."""
    short = [golden for golden in GOLDENS if 4 <= len(golden.prompt_ids) <= 64 and len(golden.output_ids) > 8][:6]
    clients = (pair, unified)
    at_once([lambda client=client, golden=golden: check_scored_as_given(client, golden) for client in clients for golden in short])
