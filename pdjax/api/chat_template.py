"""Renders a model's own chat template.

A template comes with the model, so it runs sandboxed: it can change nothing and reach no attribute that is private to Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdjax.checkpoints.base import TokenizerData
from pdjax.errors import BadRequest

_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, OverflowError)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Unlike Jinja's own filter it does not escape characters for HTML: the reader is a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _flatten(content: object, param: str) -> str:
    """The text of a message's content, a string or a list of text parts, which are joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{param} must be a string or a list of text parts, got {type(content).__name__}", param)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(f"{param}[{i}] is of type {kind!r}; only 'text' is supported", f"{param}[{i}]")
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{param}[{i}].text must be a string", f"{param}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_message(message: object, param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{param} must be an object, got {type(message).__name__}", param)
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{param}.role must be a string", f"{param}.role")
    return {**message, "content": _flatten(message.get("content"), f"{param}.content")}


class ChatTemplate:
    """A compiled template. `special_tokens` are variables of the template, such as `bos_token`.

    Raises ValueError for a template that does not compile. Safe to use from several threads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template does not compile, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_data(cls, data: TokenizerData) -> ChatTemplate | None:
        """The template of a checkpoint, None where it has none."""
        if data.chat_template is None:
            return None
        ids = {"bos_token": data.bos_token_id, "eos_token": data.eos_token_id}
        return cls(data.chat_template, {name: data.tokens[i] for name, i in ids.items() if i is not None})

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt text of a conversation. Raises BadRequest for messages that are malformed or that the template refuses."""
        if not messages:
            raise BadRequest("messages must not be empty", "messages")
        checked = [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self._template.render(messages=checked, add_generation_prompt=add_generation_prompt, **self._special_tokens)
        except _RENDER_ERRORS as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
