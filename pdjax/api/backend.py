"""What the HTTP surface and the Python API need from whatever generates tokens: the router, or a fake in tests."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator
from typing import NamedTuple

from pdjax.protocol import Finished, PromptToken, Sampling, TokenOut


class ModelCard(NamedTuple):
    """Limits that requests are checked against before any work. `max_prompt_tokens` is what the KV pools can hold."""

    name: str
    vocab_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    eos_token_ids: tuple[int, ...]


class ScoredPrompt(NamedTuple):
    """The next part of the prompt's log probabilities, from its second token on, in order."""

    tokens: list[PromptToken]


Part = ScoredPrompt | TokenOut | Finished


class Backend(abc.ABC):
    @abc.abstractmethod
    def model_card(self) -> ModelCard:
        """The served model. Raises NoWorker where no worker has told its limits yet."""

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether the next request will be taken and served."""

    @abc.abstractmethod
    def generate(self, request_id: str, prompt: list[int], sampling: Sampling, deadline_s: float) -> AsyncIterator[Part]:
        """Generate one sequence: each output token once, in order, then one `Finished`. Where `sampling` asks for prompt log
        probabilities all of them come first.

        An async generator; closing it early (`aclose`) stops the work everywhere. Raises OverCapacity or NoWorker before the first
        token; WorkerFailed or DeadlineExceeded at any time, after which the tokens given so far are right but incomplete.
        """
