"""One model over a paged KV pool: its family's blocks, one after the other, between its ends.

One forward serves prefill and decode; what differs is the `Step` it is given. All layers share one traced body: what differs between
them, such as a window, is looked up by the layer's index inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.kernels.base import Attend, AttentionSpec
from pdjax.kernels.heads import Heads, attend_heads
from pdjax.models.layers import ALONE, Chip, Ends, LayerStep, Params
from pdjax.models.registry import family_of
from pdjax.models.shape import ModelShape, weight_specs
from pdjax.models.stored import StoredWeight

KV_SCALES = "kv_scales"
"""Where the weights of a layer hold its `AttentionSpec.kv_scales`, for pools that need some."""


class Step(NamedTuple):
    """What every layer of a forward needs to know about the T token rows it works on."""

    cos: jax.Array  # as `pdjax.models.layers.rotary_tables` gives them
    sin: jax.Array
    attend: Attend


class Model:
    """The structure of one model, without weights. Its methods are traced inside the engine's programs.

    `shape` has the heads of one chip, `chip`, where several share the layers. `platform`: what it will run on.
    """

    def __init__(self, shape: ModelShape, dtype: jnp.dtype, chip: Chip = ALONE, platform: str | None = None):
        self.shape = shape
        self._chip = chip
        self._read_once = _matrices(shape) if platform == "cpu" and dtype == jnp.float32 else frozenset()
        family = family_of(shape)
        self._block_graph = nnx.split(nnx.eval_shape(lambda: family.block(shape, dtype)))[0]
        self._ends_graph = nnx.split(nnx.eval_shape(lambda: family.ends(shape, dtype)))[0]

    def ends(self, params: Params) -> Ends:
        return nnx.merge(self._ends_graph, self._as_state(params))

    def scanned(self, layers: Params, x: jax.Array, pool: jax.Array, first: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Run layers `first` and later with one traced body; `layers` holds their stacked weights. Quick to compile."""

        def body(carry: tuple[jax.Array, jax.Array], layer: tuple[Params, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
            params, index = layer
            return self._run(params, *carry, index, step), None

        indices = first + jnp.arange(len(layers["qkv"]), dtype=jnp.int32)
        (x, pool), _ = jax.lax.scan(body, (x, pool), (layers, indices))
        return x, pool

    def unrolled(self, layers: Sequence[Params], x: jax.Array, pool: jax.Array, first: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Run layers `first` and later one after the other; `layers` holds each one's weights.

        No weight is copied: a scan on CPU slices every layer's weights out of the stack first, which for a batch of one costs as
        much as the products themselves.
        """
        for index, params in enumerate(layers):
            x, pool = self._run(params, x, pool, first + index, step)
        return x, pool

    def _run(self, params: Params, x: jax.Array, pool: jax.Array, layer: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        own = {name: value for name, value in params.items() if name != KV_SCALES}
        return nnx.merge(self._block_graph, self._as_state(own))(x, pool, self._layer_step(step, layer, params.get(KV_SCALES)))

    def _layer_step(self, step: Step, layer: jax.Array, kv_scales: jax.Array | None) -> LayerStep:
        """What of `step` holds for `layer`, an int32 scalar."""
        shape, windows, cos, sin = self.shape, self.shape.windows(), step.cos, step.sin
        if shape.layer_ropes:
            table = jnp.asarray(shape.layer_ropes, jnp.int32)[layer]
            cos, sin = cos[table], sin[table]
        window = jnp.asarray(windows, jnp.int32)[layer] if windows else None
        spec = AttentionSpec(scale=shape.attention_scale, soft_cap=shape.attention_soft_cap, window=window, kv_scales=kv_scales)

        def attend(heads: Heads, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attend_heads(step.attend, heads, pool, layer, spec)

        return LayerStep(cos, sin, attend, self._chip)

    def _as_state(self, params: Params) -> nnx.State:
        """On CPU a product of a float32 matrix is that of a stored one: XLA's own takes longer for few columns."""
        plain = {name: value for name, value in params.items() if name in self._read_once and not isinstance(value, StoredWeight)}
        stored = {name: StoredWeight(value, None, value.dtype) for name, value in plain.items()}
        return nnx.State({name: nnx.Param(value) for name, value in (params | stored).items()})


def _matrices(shape: ModelShape) -> frozenset[str]:
    """Names of what activations are multiplied by, experts left out."""
    specs = weight_specs(shape).items()
    return frozenset(path.removeprefix("layers/") for path, spec in specs if spec.is_projection and "experts" not in spec.axes)
