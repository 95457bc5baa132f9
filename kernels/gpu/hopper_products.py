"""The two matrix products of the Hopper attention kernel, on the chip and in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class TensorCores:
    """Matrix products as the chip does them: asynchronous, with accumulators in registers."""

    def laid_out(self, x: jax.Array, layout: Any) -> jax.Array:
        """x spread over the threads of a warpgroup as accumulators are."""
        return plgpu.layout_cast(x, layout)

    def product_beside(self, queries: Any, keys: Any, work: Callable[[], Any]) -> tuple[jax.Array, Any]:
        """float32[64, block_keys], the product of queries and keys, and what `work` returns, which is done meanwhile."""

        def scope(product: Any) -> tuple[jax.Array, Any]:
            plgpu.wgmma(product, queries, plgpu.transpose_ref(keys, (1, 0)))
            done = work()
            return product[...], done

        return pl.run_scoped(scope, plgpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))

    def accumulated(self, out: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        """out + weights x values."""
        return pl.run_state(lambda total: plgpu.wgmma(total, weights, values))(plgpu.ACC.init(out))


class Interpreted:
    """The same in terms that the interpreter of jax 0.10.2 knows: it has no layouts and takes no operand from registers."""

    def laid_out(self, x: jax.Array, layout: Any) -> jax.Array:
        return x

    def product_beside(self, queries: Any, keys: Any, work: Callable[[], Any]) -> tuple[jax.Array, Any]:
        product = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
        return product, work()

    def accumulated(self, out: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
        return out + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)


TENSOR_CORES, INTERPRETED = TensorCores(), Interpreted()
Products = TensorCores | Interpreted
