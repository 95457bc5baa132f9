"""How KV moves between worker processes, as `transfer.kind` says."""

from __future__ import annotations

import socket

import jax
from jax.sharding import SingleDeviceSharding

from pdjax.config.schema import Config
from pdjax.engine.base import StepEngine
from pdjax.protocol import Layout
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.checksum import ChecksumPrograms
from pdjax.transfer.frames import PageForm
from pdjax.transfer.grpc_receive import Lander
from pdjax.transfer.grpc_send import Carriers
from pdjax.transfer.jax_receive import PullLander
from pdjax.transfer.jax_send import Endpoint, OfferCarriers
from pdjax.transfer.tcp_bytes import ByteCarriers, ByteLander, Landing
from pdjax.transfer.tcp_link import DataListener


def make_carriers(config: Config, layout: Layout, limits: TransferLimits, device: jax.Device) -> Carriers:
    """What an engine on `device` sends with; compiles what that needs. Raises ValueError or OSError where this machine cannot do it."""
    if config.transfer.kind == "jax_transfer":
        return OfferCarriers(_programs(config, layout, device), _endpoint(config, device), config.transfer.max_offered_bytes, limits.emulation)
    return ByteCarriers(layout, DataListener(config.worker.host, _host(config)), limits.emulation)


def make_lander(config: Config, layout: Layout, limits: TransferLimits, engine: StepEngine, device: jax.Device) -> Lander:
    """What an engine on `device` receives with; compiles what that needs. Raises ValueError or OSError where this machine cannot do it."""
    buckets = config.engine.transfer_buckets
    if config.transfer.kind == "jax_transfer":
        return PullLander(_programs(config, layout, device), buckets[-1], _endpoint(config, device), limits.stall_timeout_s)
    return ByteLander(layout, Landing(engine.put, buckets))


def _programs(config: Config, layout: Layout, device: jax.Device) -> ChecksumPrograms:
    return ChecksumPrograms(PageForm.of(layout), config.engine.transfer_buckets, SingleDeviceSharding(device))


def _endpoint(config: Config, device: jax.Device) -> Endpoint:
    """At the address under which others reach this worker: its servers tell it to each other."""
    address = socket.getaddrinfo(_host(config), None, type=socket.SOCK_STREAM)[0][4][0]
    return Endpoint(str(address), device)


def _host(config: Config) -> str:
    return config.worker.advertise_host or config.worker.host
