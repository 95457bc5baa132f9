"""Text to token ids and back, from the vocabulary that a checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, pre_tokenizers
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


def _by_pattern(max_digits: int) -> pre_tokenizers.PreTokenizer:
    """The words of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    digits = r"\p{N}" if max_digits == 1 else rf"\p{{N}}{{1,{max_digits}}}"
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    split = pre_tokenizers.Split(Regex(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _by_pattern(3),
    "smaug-bpe": lambda: _by_pattern(3),
    "qwen2": lambda: _by_pattern(1),
}
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Whose words are taken whole where the vocabulary has them, whatever the merges say."""


class Tokenizer:
    """Byte-pair encoding. Special tokens are recognised in text. Safe to use from several threads.

    `first_ids`: what every document starts with; `encode` leaves it out. Bytes that the vocabulary has no token for are dropped while
    encoding, as the model's own tokenizer does. Raises ValueError for a pre-tokenizer that is not known and for a damaged document.
    """

    def __init__(self, data: TokenizerData):
        self._bpe = _from_vocabulary(data) if data.document is None else _from_document(data.document)
        self._special_ids = data.special_ids
        self._token_bytes = _bytes_of_tokens(data)
        self.first_ids = data.first_ids or _first_ids(self._bpe)

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


def _from_vocabulary(data: TokenizerData) -> _Bpe:
    if data.pre_tokenizer not in _PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {data.pre_tokenizer!r} is not known; known: {', '.join(_PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in data.merges]
    vocabulary = {token: i for i, token in enumerate(data.tokens)}
    bpe = _Bpe(BPE(vocabulary, merges, ignore_merges=data.pre_tokenizer in _WHOLE_WORDS_FIRST))
    bpe.pre_tokenizer = _PRE_TOKENIZERS[data.pre_tokenizer]()
    for ids, is_special in ((data.special_ids, True), (data.added_ids, False)):
        bpe.add_tokens([AddedToken(data.tokens[i], special=is_special, normalized=False) for i in sorted(ids)])
    return bpe


def _from_document(document: str) -> _Bpe:
    """What a document says about padding and cutting is not for a server."""
    try:
        bpe = _Bpe.from_str(document)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"the model's tokenizer cannot be used: {error}") from error
    bpe.no_padding()
    bpe.no_truncation()
    return bpe


def _first_ids(bpe: _Bpe) -> tuple[int, ...]:
    """What the document's post-processor puts in front."""
    encoded = bpe.encode("a", add_special_tokens=True)
    is_special = [*encoded.special_tokens_mask, 0]
    return tuple(encoded.ids[: is_special.index(0)])


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece_bytes(token: str) -> bytes:
    """U+2581 stands for a space, <0x0A> for a byte."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace("\u2581", " ").encode()


def _bytes_of_tokens(data: TokenizerData) -> list[bytes]:
    """The bytes of every token. Raises ValueError naming a token with characters outside the byte-level alphabet."""
    alphabet = _byte_alphabet()
    is_byte_level = data.alphabet == "byte-level"
    plain = data.special_ids | data.added_ids
    result = []
    for i, token in enumerate(data.tokens):
        try:
            if i in plain:
                result.append(token.encode())
            else:
                result.append(bytes([alphabet[char] for char in token]) if is_byte_level else _sentencepiece_bytes(token))
        except KeyError as error:
            raise ValueError(f"token {i} of the vocabulary, {token!r}, holds {error}, outside the byte-level alphabet") from error
    return result
