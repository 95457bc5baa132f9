"""Turns a sentencepiece vocabulary with scores, as GGUF files hold it, into byte-pair merges and a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence

_SPACE = "\u2581"


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, best first: by the score of the whole, then by the longer parts."""
    known = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=lambda each: each[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def document_of(
    tokens: Sequence[str], scores: Sequence[float], special: frozenset[int], added: frozenset[int], unknown_id: int, has_prefix_space: bool
) -> str:
    """The text of a tokenizer.json. `has_prefix_space`: every text starts with a space."""
    plain = [token for i, token in enumerate(tokens) if i not in special | added]
    plain_scores = [score for i, score in enumerate(scores) if i not in special | added]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace] if has_prefix_space else [replace]
    whole = {
        "version": "1.0",
        "added_tokens": [_added(i, tokens[i], i in special) for i in sorted(special | added)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown_id],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges_of(plain, plain_scores),
        },
    }
    return json.dumps(whole)


def _added(token_id: int, token: str, is_special: bool) -> dict[str, object]:
    kept = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, "special": is_special} | kept
