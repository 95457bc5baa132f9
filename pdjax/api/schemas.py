"""What clients may send: every field of the HTTP requests, and what happens to the fields of OpenAI's API that are not served here.

Three kinds of those: without effect here (accepted), effect missing (accepted at their default, otherwise a 400), unknown (a 400).
`null` always means that the field was not given.
"""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdjax.api.errors import InvalidField
from pdjax.api.sampling_params import SamplingParams
from pdjax.errors import BadRequest
from pdjax.protocol import MAX_TOP_LOGPROBS

SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {"prompt_logprobs"}
"""OpenAI asks for log probabilities of the prompt with `echo`."""
WITHOUT_EFFECT = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls")
)
UNSUPPORTED_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields whose effect is missing here, each with the values that ask for no effect."""


_shown = reprlib.repr  # values in messages are shortened before they are printed


class Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Schema):
    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="without effect: streams are never padded")


class GenerationRequest(Schema):
    """What both endpoints have in common. `sampling` is made of the request's own top-level fields."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    sampling: SamplingParams

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """`prompt` is checked by `pdjax.api.prompts`."""

    prompt: Any
    echo: bool = False


class ChatMessage(Schema):
    """One message; `content` is checked by `pdjax.api.chat_template`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it; `developer` is OpenAI's newer word for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)


class TokenizeRequest(Schema):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool = True


class DetokenizeRequest(Schema):
    """`tokens` is checked by `pdjax.api.prompts`."""

    model: str | None = None
    tokens: list[Any]


def parse_completion(body: Any) -> CompletionRequest:
    """Raises BadRequest naming the field at fault."""
    fields = _known_fields(body, frozenset(CompletionRequest.model_fields) | SAMPLING_FIELDS | {"best_of"})
    best_of, n = fields.pop("best_of", None), fields.get("n", 1)
    if best_of is not None and (type(best_of) is not int or best_of != n):
        message = f"best_of {_shown(best_of)} is only supported where it equals n, here {_shown(n)}"
        raise InvalidField(message, "best_of", "unsupported_value")
    return _with_sampling(CompletionRequest, fields, _prompt_logprobs(fields))


def _prompt_logprobs(fields: dict[str, Any]) -> dict[str, Any]:
    """`echo` asks for the prompt's log probabilities together with `logprobs`. With `max_tokens` 0 there is nothing else to compute."""
    if fields.get("echo") is not True:
        return {}
    if (wanted := fields.get("logprobs")) is None and fields.get("max_tokens") != 0:
        return {}
    return {"prompt_logprobs": wanted or 0}


def parse_chat(body: Any) -> ChatRequest:
    """Raises BadRequest naming the field at fault."""
    extra = {"max_completion_tokens", "top_logprobs"}
    fields = _known_fields(body, frozenset(ChatRequest.model_fields) | SAMPLING_FIELDS | extra)
    _unify_max_tokens(fields)
    _unify_logprobs(fields)
    return _with_sampling(ChatRequest, fields)


def parse_tokenize(body: Any) -> TokenizeRequest:
    """Raises BadRequest naming the field at fault."""
    request = validated(TokenizeRequest, _known_fields(body, frozenset(TokenizeRequest.model_fields)))
    if (request.prompt is None) == (request.messages is None):
        raise InvalidField("give either prompt or messages", "prompt", "invalid_value")
    return request


def parse_detokenize(body: Any) -> DetokenizeRequest:
    """Raises BadRequest naming the field at fault."""
    return validated(DetokenizeRequest, _known_fields(body, frozenset(DetokenizeRequest.model_fields)))


def _known_fields(body: Any, known: frozenset[str]) -> dict[str, Any]:
    """The given fields that mean something here. Raises InvalidField for unknown and unsupported ones."""
    if not isinstance(body, dict):
        raise BadRequest("the request body must be a JSON object")
    fields = {}
    for name, value in body.items():
        if name in known and name != "sampling":
            if value is not None:
                fields[name] = value
        elif name in UNSUPPORTED_DEFAULTS:
            if value is not None and not any(type(value) is type(ok) and value == ok for ok in UNSUPPORTED_DEFAULTS[name]):
                raise InvalidField(f"{name} is not supported by this server", name, "unsupported_parameter")
        elif name not in WITHOUT_EFFECT:
            raise InvalidField(f"unknown field {name[:100]!r}", name[:100], "unknown_parameter")
    return fields


def _unify_max_tokens(fields: dict[str, Any]) -> None:
    newer = fields.pop("max_completion_tokens", None)
    if newer is None:
        return
    if fields.setdefault("max_tokens", newer) != newer:
        raise InvalidField("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens", "invalid_value")


def _unify_logprobs(fields: dict[str, Any]) -> None:
    """OpenAI's chat says with `logprobs` whether, and with `top_logprobs` how many."""
    wanted, top = fields.pop("logprobs", False), fields.pop("top_logprobs", 0)
    if type(wanted) is not bool:
        raise InvalidField(f"logprobs must be true or false, got {_shown(wanted)}", "logprobs", "invalid_type")
    if type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS:
        message = f"top_logprobs must be an integer from 0 to {MAX_TOP_LOGPROBS}, got {_shown(top)}"
        raise InvalidField(message, "top_logprobs", "invalid_value")
    if top and not wanted:
        raise InvalidField("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    if wanted:
        fields["logprobs"] = top


Request = TypeVar("Request", bound=Schema)
Generation = TypeVar("Generation", bound=GenerationRequest)


def _with_sampling(kind: type[Generation], fields: dict[str, Any], more_sampling: dict[str, Any] | None = None) -> Generation:
    sampling = {name: fields.pop(name) for name in SAMPLING_FIELDS & fields.keys()} | (more_sampling or {})
    if sampling.get("max_tokens") == 0 and "prompt_logprobs" not in sampling:
        raise InvalidField("max_tokens must be at least 1 (0 only where /v1/completions echoes), got 0", "max_tokens", "invalid_value")
    try:
        params = SamplingParams(**sampling)
    except ValidationError as error:
        raise _bad_request(error) from None
    request = validated(kind, fields | {"sampling": params})
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options needs stream: true", "stream_options", "invalid_value")
    return request


def validated(kind: type[Request], fields: dict[str, Any]) -> Request:
    """Raises InvalidField for the first mistake."""
    try:
        return kind(**fields)
    except ValidationError as error:
        raise _bad_request(error) from None


def _bad_request(error: ValidationError) -> InvalidField:
    """The first mistake of several, in a sentence that names field, limit and value."""
    first = error.errors(include_url=False, include_context=False)[0]
    loc = first["loc"][:1] if first["loc"][:1] == ("logit_bias",) else first["loc"]  # its keys are the client's, not ours
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)[:100].lstrip(".") or None
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return InvalidField(f"{param} is required", param, "missing_required_parameter")
    message = f"{param}: {reason}, got {_shown(first['input'])}" if param else reason
    return InvalidField(message, param, "invalid_value")
