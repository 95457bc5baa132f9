"""A language model whose answers can be computed by hand.

A sequence of tokens has one number, its chain: `chain = (chain * MULTIPLIER + token + 7) % MODULUS`, starting from 1. The token that
follows the sequence is `chain % VOCAB`. Modulo VOCAB this is `value = (value * 31 + token + 7) % 997`, because MULTIPLIER is 31 and MODULUS
is 0 modulo VOCAB; the chain itself is wide enough to tell any two sequences of a simulation apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdjax.protocol import Sampling

VOCAB = 997
MULTIPLIER = 31 + VOCAB * 1009
MODULUS = VOCAB * (2**31 - 1)
START = 1


def extend(chain: int, tokens: Iterable[int]) -> int:
    """The chain of a sequence that goes on with `tokens`."""
    for token in tokens:
        chain = (chain * MULTIPLIER + token + 7) % MODULUS
    return chain


def next_token(tokens: Iterable[int]) -> int:
    """The token that follows `tokens`."""
    return extend(START, tokens) % VOCAB


def expected_answer(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Every token of the answer to `prompt`, the stop token included."""
    chain = extend(START, prompt)
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        answer.append(chain % VOCAB)
        if answer[-1] in sampling.stop_token_ids and len(answer) >= sampling.min_tokens:
            break
        chain = extend(chain, answer[-1:])
    return answer
