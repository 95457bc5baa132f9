"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, and the chat template beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdjax.checkpoints.base import TokenizerData
from pdjax.checkpoints.metadata import Metadata


def read_tokenizer(folder: Path, vocab_size: int) -> TokenizerData:
    """The tokenizer of a model with `vocab_size` embeddings.

    Raises FileNotFoundError where the folder has none, ValueError where it is damaged, of a kind that is not understood, or holds ids that
    the model has no embedding for.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; slow tokenizers (tokenizer.model alone) are not read")
    text, whole = _read(path)
    model, added = whole.section("model"), whole.optional("added_tokens", [])
    if (kind := model.optional("type", "BPE")) != "BPE":
        raise ValueError(f"{path}: a tokenizer of type {kind!r} is not supported; supported is 'BPE'")
    ids = {str(token): number for token, number in model.required("vocab", dict).items()}
    ids |= {entry["content"]: entry["id"] for entry in added if _is_added_token(entry)}
    if not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise ValueError(f"{path}: its vocabulary is empty or holds ids that are no numbers")
    if (last := max(ids.values())) >= vocab_size:
        raise ValueError(f"{path}: the tokenizer has ids up to {last}, the model has embeddings for {vocab_size} tokens")
    tokens = [""] * vocab_size
    for token, number in ids.items():
        tokens[number] = token
    settings = _settings(folder)
    return TokenizerData(
        tokens=tuple(tokens),
        merges=(),
        special_ids=frozenset(entry["id"] for entry in added if _is_added_token(entry) and entry.get("special")),
        added_ids=frozenset(entry["id"] for entry in added if _is_added_token(entry) and not entry.get("special")),
        pre_tokenizer="",
        chat_template=_chat_template(folder, settings),
        bos_token_id=_special_id(settings, "bos_token", ids),
        eos_token_id=_special_id(settings, "eos_token", ids),
        document=text,
        alphabet="byte-level" if _mentions(whole.values, "ByteLevel") else "sentencepiece",
    )


def _read(path: Path) -> tuple[str, Metadata]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not an object")
    return text, Metadata(str(path), values)


def _is_added_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int


def _mentions(whole: dict[str, Any], kind: str) -> bool:
    """Whether decoder or pre-tokenizer, or a member of their sequences, is of this type."""
    found = []
    for name, members in (("decoder", "decoders"), ("pre_tokenizer", "pretokenizers")):
        part = whole.get(name)
        part = part if isinstance(part, dict) else {}
        several = part.get(members, [])
        found += [part.get("type"), *(each.get("type") for each in several if isinstance(each, dict))]
    return kind in found


def _settings(folder: Path) -> Metadata:
    path = folder / "tokenizer_config.json"
    return _read(path)[1] if path.is_file() else Metadata(str(path), {})


def _chat_template(folder: Path, settings: Metadata) -> str | None:
    """chat_template.jinja, or `chat_template`: one, or a list of named ones, of which `default` counts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.values.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_id(settings: Metadata, key: str, ids: dict[str, int]) -> int | None:
    token = settings.values.get(key)
    content = token.get("content") if isinstance(token, dict) else token
    return ids.get(content) if isinstance(content, str) else None
