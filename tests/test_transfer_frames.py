"""Chunks as bytes and back: padding, checksums, and everything that the head of a chunk can have wrong."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.protocol import ChunkHead, Layout
from pdjax.transfer.frames import ChunkBuffer, PageForm, to_host
from pdjax.transfer.rooms import FailureKind, RoomFault
from pdjax.transfer.sender import OutboundChunk

PAGE = PageForm((2, 4, 4, 8), np.dtype(np.float32))


def layout(kv_dtype: str) -> Layout:
    return Layout(model_fingerprint="tiny", page_size=4, kv_dtype=kv_dtype, num_layers=2, num_kv_heads=2, head_dim=8)


ADDRESS = "127.0.0.1:1"


def refill(buffer: ChunkBuffer, payload: bytes, part_bytes: int) -> None:
    """As a socket does: some bytes at a time, where the buffer says."""
    for start in range(0, len(payload), part_bytes):
        part = payload[start : start + part_bytes]
        assert buffer.rest.nbytes == len(payload) - start
        buffer.rest[: len(part)] = part
        buffer.filled(len(part))


@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_page_has_layers_times_tokens_times_both_heads_times_dims_values(kv_dtype: str, itemsize: int) -> None:
    page = PageForm.of(layout(kv_dtype))
    assert page.shape == (2, 4, 4, 8)
    assert page.num_bytes == 2 * 4 * 4 * 8 * itemsize


def test_the_checksum_is_xxh3_64_of_the_counting_rows_alone() -> None:
    page = PageForm((1, 1, 2, 2), np.dtype(np.uint8))
    chunk = to_host(OutboundChunk(7, 1, jnp.asarray([[[[[1, 2], [3, 4]]]], [[[[9, 9], [9, 9]]]]], jnp.uint8)), page, ADDRESS)
    assert bytes(chunk.payload) == b"\x01\x02\x03\x04"
    assert chunk.head == ChunkHead(7, 1, 4, xxhash.xxh3_64_intdigest(b"\x01\x02\x03\x04"), ADDRESS)


def test_checksums_are_the_published_xxh3_64() -> None:
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2, "the value that the xxHash specification gives for no input, seed 0"


@settings(max_examples=40, deadline=None)
@given(
    num_pages=st.integers(1, 8),
    num_padding=st.integers(0, 3),
    part_bytes=st.integers(1, 5000),
    kv_dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_a_chunk_comes_back_bit_by_bit_padded_with_zeros(
    num_pages: int, num_padding: int, part_bytes: int, kv_dtype: str, seed: int
) -> None:
    page = PageForm.of(layout(kv_dtype))
    bits = np.random.default_rng(seed).integers(0, 256, (num_pages + num_padding) * page.num_bytes, np.uint8)
    rows = bits.view(page.dtype).reshape(-1, *page.shape)  # any bits at all, NaNs included
    sent = to_host(OutboundChunk(3, num_pages, jnp.asarray(rows)), page, ADDRESS)
    buffer = ChunkBuffer(sent.head, page, (1, 2, 4, 8))
    refill(buffer, bytes(sent.payload), part_bytes)
    assert buffer.is_full
    buffer.verify()
    arrived = buffer.rows_host.reshape(-1).view(np.uint8)
    assert len(buffer.rows_host) == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}[num_pages]
    assert arrived[: num_pages * page.num_bytes].tobytes() == bits[: num_pages * page.num_bytes].tobytes()
    assert not arrived[num_pages * page.num_bytes :].any()


def head(num_pages: int = 2, num_bytes: int | None = None, checksum: int = 0) -> ChunkHead:
    return ChunkHead(0, num_pages, num_pages * PAGE.num_bytes if num_bytes is None else num_bytes, checksum, ADDRESS)


@pytest.mark.parametrize("num_pages", [0, -1, 5, 1 << 40])
def test_a_chunk_of_a_size_that_the_engine_has_no_program_for_is_not_even_allocated(num_pages: int) -> None:
    with pytest.raises(RoomFault, match=f"chunk of {num_pages} pages, 1 to 4 are taken") as caught:
        ChunkBuffer(head(num_pages), PAGE, (1, 4))
    assert caught.value.kind is FailureKind.PROTOCOL


def test_a_head_whose_bytes_do_not_fit_its_pages_names_both() -> None:
    with pytest.raises(RoomFault, match=f"chunk of 2 pages announces 17 bytes, it has {2 * PAGE.num_bytes}"):
        ChunkBuffer(head(num_bytes=17), PAGE, (1, 4))


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 2 * PAGE.num_bytes - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_noticed(position: int, bit: int) -> None:
    payload = bytearray(np.random.default_rng(1).integers(0, 256, 2 * PAGE.num_bytes, np.uint8).tobytes())
    checksum = xxhash.xxh3_64_intdigest(payload)
    payload[position] ^= 1 << bit
    buffer = ChunkBuffer(head(checksum=checksum), PAGE, (4,))
    refill(buffer, bytes(payload), len(payload))
    with pytest.raises(RoomFault, match="pages 0 to 1 arrived damaged") as caught:
        buffer.verify()
    assert caught.value.kind is FailureKind.DAMAGED
