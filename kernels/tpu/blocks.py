"""How a block of the pool in VMEM splits into the keys and the values of one head, and their products.

A block lies in VMEM as `[D / lanes, tokens, rows, lanes]`, lanes at most 128, rows `2 * K` or a few more. Mosaic stores its last two axes
as tiles of 32-bit words: a word holds one float32, or a key and a value of one head (bfloat16), or keys and values of two heads (int8,
fp8), by turns along the rows. So one strided load of words, one for each token, has all that belongs to a head, and shifts take it apart.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_SUBLANES = 8


def block_shape(tokens: int, num_rows: int, head_dim: int, itemsize: int) -> tuple[int, int, int, int]:
    """The shape in VMEM of a block of `tokens` times [num_rows, head_dim]. 3 KV heads take the room of 4, for words to have a stride."""
    lanes = min(head_dim, LANES)
    rows = _SUBLANES if itemsize > 1 and num_rows == 6 else num_rows
    return head_dim // lanes, tokens, rows, lanes


LoadWords = Callable[[jax.Ref, int], jax.Array]
"""(block [tokens, rows, lanes], i) -> the i-th word of every token, [tokens, lanes]: uint32 or, for float32 blocks, float32."""


def split_head(block: jax.Ref, head: int, dtype: jnp.dtype, load: LoadWords) -> tuple[jax.Array, jax.Array]:
    """Keys and values `dtype[tokens, D]` of a KV head. Row r of both is of the token `token_of_row(r)`."""
    parts = [_split_lanes(block.at[part], head, load) for part in range(block.shape[0])]
    keys, values = (jnp.concatenate(columns, axis=1) if len(columns) > 1 else columns[0] for columns in zip(*parts, strict=True))
    return keys.astype(dtype), values.astype(dtype)


def load_words(block: jax.Ref, i: int) -> jax.Array:
    """A strided load. Where rows do not fill tiles of words, Mosaic has none, only a slow shuffle."""
    words = block if block.dtype.itemsize == 4 else block.bitcast(jnp.uint32)
    tokens, rows, lanes = words.shape
    tile = min(_SUBLANES, pl.next_power_of_2(rows))
    if rows % tile:
        return words[:, i, :]
    return words.reshape(tokens * rows, lanes)[pl.ds(i, tokens, stride=rows), :]


def load_words_interpreted(block: jax.Ref, i: int) -> jax.Array:
    """The same from plain loads: interpret mode knows no views of references."""
    packing = 4 // block.dtype.itemsize
    if packing == 1:
        return block[:, i, :]
    return pltpu.bitcast(block[:, i * packing : (i + 1) * packing, :], jnp.uint32)[:, 0]


StoreWords = Callable[[jax.Ref, int, jax.Array], None]
"""(block [tokens, rows, lanes], i, words [tokens, lanes]): the reverse of `LoadWords`."""


def join_head(block: jax.Ref, head: int, keys: jax.Array, values: jax.Array, store: StoreWords) -> None:
    """Put float32 keys and values [D, tokens] of a KV head into a block `[D / lanes, tokens, 2 * K, lanes]` of 16 or 32 bits."""
    if block.dtype.itemsize == 4:
        for i, entry in enumerate((keys, values)):
            _store_parts(block, 2 * head + i, pltpu.bitcast(entry, jnp.uint32), store)
        return
    low, high = (pltpu.bitcast(entry.astype(block.dtype).astype(jnp.float32), jnp.uint32) for entry in (keys, values))
    _store_parts(block, head, (low >> 16) | high, store)


def _store_parts(block: jax.Ref, i: int, words: jax.Array, store: StoreWords) -> None:
    """words [D, tokens] become the i-th word of every token."""
    by_token = pltpu.bitcast(pltpu.bitcast(words, jnp.int32).T, jnp.uint32)
    parts, _, _, lanes = block.shape
    for part in range(parts):
        store(block.at[part], i, by_token[:, part * lanes : (part + 1) * lanes])


def store_words(block: jax.Ref, i: int, words: jax.Array) -> None:
    """A strided store, where Mosaic has one."""
    view = block.bitcast(jnp.uint32)
    tokens, rows, lanes = view.shape
    tile = min(_SUBLANES, pl.next_power_of_2(rows))
    if rows % tile:
        view[:, i, :] = words
        return
    view.reshape(tokens * rows, lanes)[pl.ds(i, tokens, stride=rows), :] = words


def store_words_interpreted(block: jax.Ref, i: int, words: jax.Array) -> None:
    """The same by a plain store."""
    packing = 4 // block.dtype.itemsize
    block[:, i * packing : (i + 1) * packing, :] = pltpu.bitcast(words[:, None, :], block.dtype)


def _split_lanes(block: jax.Ref, head: int, load: LoadWords) -> tuple[jax.Array, jax.Array]:
    """`split_head` of a block [tokens, rows, lanes]."""
    if block.dtype.itemsize == 4:
        return load(block, 2 * head), load(block, 2 * head + 1)
    if block.dtype.itemsize == 2:
        return _split_pairs(load(block, head), block.dtype)
    word, shift = load(block, head // 2), 16 * (head % 2)
    return _unpack_byte(word, shift, block.dtype), _unpack_byte(word, shift + 8, block.dtype)


def token_of_row(row: jax.Array, tokens: int, itemsize: int) -> jax.Array:
    """Which token of a block the rows of `split_head` are of: pairs of 16-bit rows come from the two halves of the block."""
    return (row >> 1) + (row & 1) * (tokens // 2) if itemsize == 2 else row


def _split_pairs(word: jax.Array, stored: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """A word is (key, value); two of them, of tokens half a block apart, become a pair of keys and a pair of values."""
    first, second = jnp.split(word, 2)
    low = jnp.uint32(0xFFFF)
    keys, values = (first & low) | (second << 16), (first >> 16) | (second & ~low)
    return pltpu.bitcast(keys, stored), pltpu.bitcast(values, stored)


def _unpack_byte(word: jax.Array, shift: int, stored: jnp.dtype) -> jax.Array:
    """float32 of the byte at bit `shift` of each word."""
    top = pltpu.bitcast(word << (24 - shift), jnp.int32)  # the byte is the highest one now, its sign the sign
    return (top >> 24).astype(jnp.float32) if stored == jnp.int8 else _from_e4m3(top)


def _from_e4m3(top: jax.Array) -> jax.Array:
    """Sign, exponent and mantissa go where float32 has them, with an exponent too low by the difference of the biases, 127 - 7.

    Magnitudes below 2 ** -6, 1 / 28,672 of the largest, are subnormal in both formats, and the vector unit reads them as 0.
    """
    return pltpu.bitcast((top >> 4) & jnp.int32(-0x80000000 | 0x07F00000), jnp.float32) * 2.0**120


def times_keys(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[rows, D] and [tokens, D]: float32[rows, tokens]."""
    return _product(queries, keys, (((1,), (1,)), ((), ())))


def times_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """[rows, tokens] and [tokens, D]: float32[rows, D]."""
    return _product(weights, values, (((1,), (0,)), ((), ())))


def _product(a: jax.Array, b: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dimension_numbers, precision=precision, preferred_element_type=jnp.float32)
