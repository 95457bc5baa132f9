"""gRPC without generated code: method names, and msgspec as the serializer. Nothing is unpickled; malformed messages are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

WORKER_SERVICE = "pdjax.Worker"
ROUTER_SERVICE = "pdjax.Router"

PREFILL = f"/{WORKER_SERVICE}/Prefill"  # SequenceRequest -> stream Event
DECODE = f"/{WORKER_SERVICE}/Decode"  # SequenceRequest -> stream Event
FETCH_KV = f"/{WORKER_SERVICE}/FetchKV"  # Announce -> stream KVFrame
PULLED_KV = f"/{WORKER_SERVICE}/PulledKV"  # ChunkPulled -> PulledReply
JOIN = f"/{ROUTER_SERVICE}/Join"  # stream MembershipMessage -> stream RouterHello

MAX_MESSAGE_BYTES = 16 << 20

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

SERVER_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
]
"""Two servers on one port are a mistake that must show. A peer that answers no ping for 10 s loses its connection; peers may ping as often
as they like."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def decoder(message_type: Any) -> Callable[[bytes], Any]:
    """A deserializer for `message_type`; it raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.Decoder(message_type).decode
