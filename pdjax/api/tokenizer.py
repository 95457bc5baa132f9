"""Text to token ids and back, from the vocabulary that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as _Bpe
from tokenizers.models import BPE

from pdjax.checkpoints.base import TokenizerData
from pdjax.errors import BadRequest


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for their own byte, the other 68 bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit on its own, then GPT-2's words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS = {"smollm": _smollm, "gpt-2": _gpt2}


class Tokenizer:
    """Byte-level byte-pair encoding. Special tokens are recognised in text. Safe to use from several threads.

    Bytes that the vocabulary has no token for are dropped while encoding, as the model's own tokenizer does. Raises ValueError for a
    pre-tokenizer that is not known.
    """

    def __init__(self, data: TokenizerData):
        if data.pre_tokenizer not in _PRE_TOKENIZERS:
            raise ValueError(f"pre-tokenizer {data.pre_tokenizer!r} is not known; known: {', '.join(_PRE_TOKENIZERS)}")
        merges = [tuple(merge.split(" ", 1)) for merge in data.merges]
        self._bpe = _Bpe(BPE({token: i for i, token in enumerate(data.tokens)}, merges))
        self._bpe.pre_tokenizer = _PRE_TOKENIZERS[data.pre_tokenizer]()
        for ids, is_special in ((data.special_ids, True), (data.added_ids, False)):
            self._bpe.add_tokens([AddedToken(data.tokens[i], special=is_special, normalized=False) for i in sorted(ids)])
        self._special_ids = data.special_ids
        self._token_bytes = _bytes_of_tokens(data)

    @property
    def vocab_size(self) -> int:
        return len(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added in front or behind. Raises BadRequest for text that is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"text is not valid Unicode: lone surrogate {text[error.start]!a} at character {error.start}") from error
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`, with U+FFFD for what is not valid UTF-8. Raises BadRequest for an id outside the vocabulary."""
        shown = (self.token_bytes(i) for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(shown).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for, possibly a part of a character. Raises BadRequest for an id outside the vocabulary."""
        if not 0 <= token < len(self._token_bytes):
            raise BadRequest(f"token id {token} is outside the vocabulary, 0 to {len(self._token_bytes) - 1}")
        return self._token_bytes[token]

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token).decode(errors="replace")


def _bytes_of_tokens(data: TokenizerData) -> list[bytes]:
    """The bytes of every token. Raises ValueError naming a token with characters outside the byte-level alphabet."""
    alphabet = _byte_alphabet()
    plain = data.special_ids | data.added_ids
    result = []
    for i, token in enumerate(data.tokens):
        try:
            result.append(token.encode() if i in plain else bytes([alphabet[char] for char in token]))
        except KeyError as error:
            raise ValueError(f"token {i} of the vocabulary, {token!r}, holds {error}, outside the byte-level alphabet") from error
    return result
