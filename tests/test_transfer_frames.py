"""Chunks as frames and back: bytes, padding, checksums, and everything that a frame can have wrong."""

from __future__ import annotations

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax import rpc
from pdjax.protocol import KV_FRAME_BYTES, ChunkData, ChunkHead, KVFrame, Layout
from pdjax.transfer.frames import ArrivingFrame, ChunkBuffer, DataView, PageForm, data_frames, to_host
from pdjax.transfer.rooms import FailureKind, RoomFault
from pdjax.transfer.sender import OutboundChunk

PAGE = PageForm((2, 4, 4, 8), np.dtype(np.float32))


def layout(kv_dtype: str) -> Layout:
    return Layout(model_fingerprint="tiny", page_size=4, kv_dtype=kv_dtype, num_layers=2, num_kv_heads=2, head_dim=8)


def refill(buffer: ChunkBuffer, payload: bytes, frame_bytes: int) -> None:
    for start in range(0, len(payload), frame_bytes):
        buffer.write(memoryview(payload[start : start + frame_bytes]))


@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_page_has_layers_times_tokens_times_both_heads_times_dims_values(kv_dtype: str, itemsize: int) -> None:
    page = PageForm.of(layout(kv_dtype))
    assert page.shape == (2, 4, 4, 8)
    assert page.num_bytes == 2 * 4 * 4 * 8 * itemsize


def test_the_checksum_is_xxh3_64_of_the_counting_rows_alone() -> None:
    page = PageForm((1, 1, 2, 2), np.dtype(np.uint8))
    chunk = to_host(OutboundChunk(7, 1, jnp.asarray([[[[[1, 2], [3, 4]]]], [[[[9, 9], [9, 9]]]]], jnp.uint8)), page)
    assert bytes(chunk.payload) == b"\x01\x02\x03\x04"
    assert chunk.head == ChunkHead(7, 1, 4, xxhash.xxh3_64_intdigest(b"\x01\x02\x03\x04"))


def test_checksums_are_the_published_xxh3_64() -> None:
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2, "the value that the xxHash specification gives for no input, seed 0"


@settings(max_examples=40, deadline=None)
@given(
    num_pages=st.integers(1, 8),
    num_padding=st.integers(0, 3),
    frame_bytes=st.integers(1, 5000),
    kv_dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_a_chunk_comes_back_bit_by_bit_padded_with_zeros(
    num_pages: int, num_padding: int, frame_bytes: int, kv_dtype: str, seed: int
) -> None:
    page = PageForm.of(layout(kv_dtype))
    bits = np.random.default_rng(seed).integers(0, 256, (num_pages + num_padding) * page.num_bytes, np.uint8)
    rows = bits.view(page.dtype).reshape(-1, *page.shape)  # any bits at all, NaNs included
    sent = to_host(OutboundChunk(3, num_pages, jnp.asarray(rows)), page)
    buffer = ChunkBuffer(sent.head, page, (1, 2, 4, 8))
    refill(buffer, bytes(sent.payload), frame_bytes)
    assert buffer.is_full
    buffer.verify()
    arrived = buffer.rows_host.reshape(-1).view(np.uint8)
    assert len(buffer.rows_host) == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}[num_pages]
    assert arrived[: num_pages * page.num_bytes].tobytes() == bits[: num_pages * page.num_bytes].tobytes()
    assert not arrived[num_pages * page.num_bytes :].any()


@pytest.mark.parametrize("num_bytes", [1, KV_FRAME_BYTES - 1, KV_FRAME_BYTES, KV_FRAME_BYTES + 1, 3 * KV_FRAME_BYTES])
def test_frames_are_views_of_at_most_the_frame_size_and_miss_nothing(num_bytes: int) -> None:
    payload = memoryview(np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8))
    frames = list(data_frames(payload))
    assert len(frames) == -(-num_bytes // KV_FRAME_BYTES)
    assert all(isinstance(frame.payload, memoryview) and len(frame.payload) <= KV_FRAME_BYTES for frame in frames)
    assert b"".join(bytes(frame.payload) for frame in frames) == payload.tobytes()


def test_an_arriving_data_frame_is_read_in_place_and_the_words_are_those_of_the_protocol() -> None:
    message = rpc.encode(ChunkData(b"abc"))
    arrived = rpc.decoder(ArrivingFrame)(message)
    assert isinstance(arrived, DataView) and bytes(arrived.payload) == b"abc"
    assert arrived.payload.obj is message
    assert rpc.decoder(KVFrame)(rpc.encode(ChunkData(memoryview(b"abc")))) == ChunkData(b"abc")  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        rpc.decoder(ArrivingFrame)(msgspec.msgpack.encode({"type": "data", "payload": 5}))


def head(num_pages: int = 2, num_bytes: int | None = None, checksum: int = 0) -> ChunkHead:
    return ChunkHead(0, num_pages, num_pages * PAGE.num_bytes if num_bytes is None else num_bytes, checksum)


@pytest.mark.parametrize("num_pages", [0, -1, 5, 1 << 40])
def test_a_chunk_of_a_size_that_the_engine_has_no_program_for_is_not_even_allocated(num_pages: int) -> None:
    with pytest.raises(RoomFault, match=f"chunk of {num_pages} pages, 1 to 4 are taken") as caught:
        ChunkBuffer(head(num_pages), PAGE, (1, 4))
    assert caught.value.kind is FailureKind.PROTOCOL


def test_a_head_whose_bytes_do_not_fit_its_pages_names_both() -> None:
    with pytest.raises(RoomFault, match=f"chunk of 2 pages announces 17 bytes, it has {2 * PAGE.num_bytes}"):
        ChunkBuffer(head(num_bytes=17), PAGE, (1, 4))


def test_a_frame_beyond_what_was_announced_is_turned_down() -> None:
    buffer = ChunkBuffer(head(), PAGE, (4,))
    buffer.write(memoryview(bytes(PAGE.num_bytes)))
    with pytest.raises(RoomFault, match=f"data frame of {PAGE.num_bytes + 1} bytes after {PAGE.num_bytes} of {2 * PAGE.num_bytes}"):
        buffer.write(memoryview(bytes(PAGE.num_bytes + 1)))


def test_an_empty_frame_is_turned_down_so_that_a_stream_of_them_cannot_hold_a_room() -> None:
    with pytest.raises(RoomFault, match="data frame of 0 bytes"):
        ChunkBuffer(head(), PAGE, (4,)).write(memoryview(b""))


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 2 * PAGE.num_bytes - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_noticed(position: int, bit: int) -> None:
    payload = bytearray(np.random.default_rng(1).integers(0, 256, 2 * PAGE.num_bytes, np.uint8).tobytes())
    checksum = xxhash.xxh3_64_intdigest(payload)
    payload[position] ^= 1 << bit
    buffer = ChunkBuffer(head(checksum=checksum), PAGE, (4,))
    buffer.write(memoryview(payload))
    with pytest.raises(RoomFault, match="pages 0 to 1 arrived damaged") as caught:
        buffer.verify()
    assert caught.value.kind is FailureKind.DAMAGED
