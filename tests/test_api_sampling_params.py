"""SamplingParams as the Python API uses them."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import ValidationError

from pdjax.api.errors import ContextLengthExceeded
from pdjax.api.sampling_params import SamplingParams
from pdjax.errors import BadRequest
from tests.fake_backend import CARD, EOS, VOCAB_SIZE


def test_params_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": float("inf")}, {"n": True}, {"max_tokens": 0}, {"stop": ""}, {"x": 1}],
)
def test_a_bad_field_is_named(fields):
    with pytest.raises(ValidationError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_stop_may_be_one_string_a_list_or_a_tuple():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == SamplingParams(stop=("ab", "c")).stop == ("ab", "c")


def test_keys_of_logit_bias_may_be_ids_or_their_json_form():
    assert SamplingParams(logit_bias={"7": 1.5}).logit_bias == SamplingParams(logit_bias={7: 1.5}).logit_bias == {7: 1.5}


def test_min_tokens_above_max_tokens_is_refused_with_both_values():
    with pytest.raises(ValidationError, match="min_tokens 5 exceeds max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_the_models_end_tokens_stop_unless_ignored():
    assert SamplingParams(stop_token_ids=[3, EOS]).to_sampling(CARD, 1, 16).stop_token_ids == (EOS, 3)
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).to_sampling(CARD, 1, 16).stop_token_ids == (3,)


@pytest.mark.parametrize("seed, choice, expected", [(0, 0, 0), (7, 3, 10), (-1, 0, 2**63 - 1), (-1, 1, 0), (2**63 - 1, 1, 0)])
def test_seeds_count_up_by_choice_and_become_63_bits_without_a_sign(seed, choice, expected):
    assert SamplingParams(seed=seed).to_sampling(CARD, 1, 16, choice).seed == expected


@pytest.mark.parametrize("top_k, expected", [(-1, 0), (0, 0), (5, 5), (10**9, VOCAB_SIZE)])
def test_top_k_has_two_ways_to_say_no_limit_and_never_exceeds_the_vocabulary(top_k, expected):
    assert SamplingParams(top_k=top_k).to_sampling(CARD, 1, 16).top_k == expected


@pytest.mark.parametrize(
    "prompt_tokens, max_tokens, expected", [(1, None, 16), (48, None, 16), (48, 16, 16), (1, 63, 63), (40, 24, 24), (45, None, 16)]
)
def test_max_tokens_is_resolved_against_the_context(prompt_tokens, max_tokens, expected):
    assert SamplingParams(max_tokens=max_tokens).to_sampling(CARD, prompt_tokens, 16).max_tokens == expected


def test_only_the_default_is_clipped_to_the_context():
    assert SamplingParams().to_sampling(CARD, 48, 256).max_tokens == 16
    with pytest.raises(ContextLengthExceeded, match="48 tokens \\+ max_tokens 17"):
        SamplingParams(max_tokens=17).to_sampling(CARD, 48, 256)


def test_a_prompt_longer_than_the_pools_is_refused_with_the_limit():
    with pytest.raises(ContextLengthExceeded, match="49 tokens, this server takes at most 48"):
        SamplingParams().to_sampling(CARD, 49, 16)


def test_min_tokens_above_a_default_limit_is_refused():
    with pytest.raises(BadRequest, match="min_tokens 17"):
        SamplingParams(min_tokens=17).to_sampling(CARD, 1, 16)
