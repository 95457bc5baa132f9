"""From a row of a step's output to the token that goes on the wire."""

from __future__ import annotations

from pdjax.engine.batch import StepOutput
from pdjax.protocol import Sampling, TokenOut


def token_out(output: StepOutput, row: int, index: int, sampling: Sampling) -> TokenOut:
    """Row `row` of `output` as output token number `index`, with as many log probabilities as `sampling` asks for."""
    token = int(output.tokens[row])
    if sampling.logprobs is None:
        return TokenOut(index, token)
    assert output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None, "logprobs were asked for"
    best = slice(0, sampling.logprobs)
    top = list(zip(output.top_ids[row, best].tolist(), output.top_logprobs[row, best].tolist(), strict=True))
    return TokenOut(index, token, float(output.logprobs[row]), top)
