"""Every program that an engine may run, described: what it computes, for which sizes, on arguments of which shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from pdjax.config.environment import attention_override
from pdjax.config.schema import EngineConfig
from pdjax.engine.compilation import ALL_PROGRAMS, ProgramKey, Programs
from pdjax.engine.kv_scales import KVScales, find_scales, read_scales, scales_spec, with_scales
from pdjax.engine.mesh import Placement, chips_for
from pdjax.engine.packing import Field, PackedLayout
from pdjax.engine.sampling import Sampled, count_tokens, greedy, log_probabilities, sample, sampler_layout
from pdjax.engine.state import HISTORY_CHUNK_TOKENS, DeviceState, History, extend_history, new_state
from pdjax.engine.steps import SCORE_LAYOUT, Pieces, StepDimensions, decode_layout, make_decode, make_prefill, make_score, prefill_layout
from pdjax.engine.weights import LayerGroup, Weights, place_weights
from pdjax.kernels.base import BITS_OF_FLOAT, Attention, same_bits
from pdjax.kernels.dispatch import Setting, choose_attention, choose_pages, pool_format
from pdjax.models.layers import Params
from pdjax.models.model import KV_SCALES, Model
from pdjax.models.shape import ModelShape, weight_specs

_CPU_GROUPS = {"prefill_layers": 1, "decode_layers": 5}
"""Layers that one program runs on CPU, unrolled, by program. More of them save calls, of about 50 us each, and cost time to compile.
Elsewhere one program scans over all layers."""

_PREFILL_STEP = ("prefill_begin", "prefill_layers", "prefill_end")
_DECODE_STEP = ("decode_begin", "decode_layers", "decode_end")

Lower = Callable[[], jax.stages.Lowered]


class Library:
    """Holds the weights and layouts that programs work with. The engine reads its attributes and never changes them."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        config: EngineConfig,
        dtype: jnp.dtype,
        placement: Placement,
        attention: Attention | None,
    ):
        self.chips = chips_for(shape, placement)
        self._config = config
        self._kv_dtype = dtype if config.kv_dtype == "auto" else jnp.dtype(config.kv_dtype)
        self.kv_scales = _scales_of_file(shape, config, self._kv_dtype)
        weights_dtype = dtype if config.weights_dtype == "auto" else jnp.dtype(config.weights_dtype)
        self.weights = place_weights(shape, weights, dtype, self.chips, self.chips.platform == "cpu", weights_dtype)
        self._layer_specs = {
            path.removeprefix("layers/"): spec.of_one_layer() for path, spec in weight_specs(shape).items() if spec.is_layered
        }
        if self._kv_dtype == jnp.int8 and self.kv_scales is None:
            self.kv_scales = find_scales(shape, self.weights, self.chips, self._layer_specs)
        if self.kv_scales is not None:
            self.weights = with_scales(self.weights, self.kv_scales, self.chips)
            self._layer_specs[KV_SCALES] = scales_spec(self.chips.num_pool_heads)
        self.layer_groups = {name: self.weights.groups(size) for name, size in _CPU_GROUPS.items()}
        self.dims = StepDimensions(
            page_size=config.page_size,
            table_pages=min(-(-shape.max_context_tokens // config.page_size), config.num_pages),
            max_prefill_seqs=config.max_prefill_seqs,
            padding_slot=config.max_running,
        )
        self.prefill_layouts = {size: prefill_layout(self.dims, size) for size in config.prefill_buckets}
        self.decode_layouts = {size: decode_layout(self.dims, size) for size in config.decode_buckets}
        self._sampler_sizes = {
            Programs.PREFILL: sorted({1, config.max_prefill_seqs}),
            Programs.DECODE: list(config.decode_buckets),
        }
        self.sampler_layouts = {size: sampler_layout(size) for sizes in self._sampler_sizes.values() for size in sizes}
        self.history_layout = PackedLayout(
            {"slot": Field((1,)), "keep": Field((1,)), "prompt": Field((HISTORY_CHUNK_TOKENS,)), "output": Field((HISTORY_CHUNK_TOKENS,))}
        )
        self._dtype = dtype
        self._model = Model(self.chips.local_shape, dtype, self.chips.chip, self.chips.platform)
        pool_dtype = BITS_OF_FLOAT.get(self._kv_dtype, self._kv_dtype) if self.chips.platform == "cpu" else self._kv_dtype
        self._make_state = partial(
            new_state, shape, self.chips.num_pool_heads, config.num_pages, config.page_size, config.max_running, pool_dtype
        )
        abstract = jax.eval_shape(self._make_state)
        self._pool_format = pool_format(self.chips.pool, self.chips.platform)
        self._state_formats = replace(jax.tree.map(lambda _: self.chips.replicated, abstract), pool=self._pool_format)
        self._state = jax.tree.map(_located, abstract, self._state_formats)
        self._attention = attention or choose_attention(self._setting(), attention_override())
        self._pages = choose_pages(self._setting(), attention_override())

    def _setting(self) -> Setting:
        """What one chip sees."""
        shape, pool = self.chips.local_shape, self._state.pool
        local_pool = (*pool.shape[:3], 2 * shape.num_kv_heads, shape.head_dim)
        return Setting(
            device=next(iter(self.chips.replicated.device_set)),
            queries=jax.ShapeDtypeStruct((self._config.prefill_buckets[-1], shape.num_heads, shape.head_dim), self._dtype),
            pool=jax.ShapeDtypeStruct(local_pool, pool.dtype),
            tables=jax.ShapeDtypeStruct((max(self.dims.max_prefill_seqs, self._config.decode_buckets[-1]), self.dims.table_pages), jnp.int32),
        )

    def new_state(self) -> DeviceState:
        """A fresh pool, on the device."""
        return jax.jit(self._make_state, out_shardings=self._state_formats)()

    def keys(self, programs: Programs) -> list[ProgramKey]:
        """Every program of the groups, decode first: a prefill worker started beside a decode worker then fills the compile cache
        with what the latter comes to last."""
        keys: dict[ProgramKey, None] = {ProgramKey("history", HISTORY_CHUNK_TOKENS): None}
        for group, names, sizes in (
            (Programs.DECODE, (*_DECODE_STEP, "greedy", "sample", "sample_logprobs"), self._config.decode_buckets),
            (Programs.PREFILL, (*_PREFILL_STEP, "score"), self._config.prefill_buckets),
            (Programs.PREFILL, ("greedy", "sample", "sample_logprobs"), self._sampler_sizes[Programs.PREFILL]),
            (Programs.GATHER, ("gather",), self._config.transfer_buckets),
            (Programs.INSTALL, ("install",), self._config.transfer_buckets),
        ):
            if group in programs:
                keys |= dict.fromkeys(ProgramKey(name, size) for name in names for size in sizes)
        return list(keys)

    def lowered(self) -> dict[ProgramKey, Lower]:
        """How to trace each program of every group."""
        makers: dict[str, Callable[[int], jax.stages.Lowered]] = {
            **{name: partial(self._lower_prefill, name) for name in _PREFILL_STEP},
            **{name: partial(self._lower_decode, name) for name in _DECODE_STEP},
            "score": self._lower_score,
            "greedy": self._lower_greedy,
            "sample": self._lower_sample,
            "sample_logprobs": self._lower_sample_logprobs,
            "history": self._lower_history,
            "gather": self._lower_gather,
            "install": self._lower_install,
        }
        return {key: partial(makers[key.name], key.size) for key in self.keys(ALL_PROGRAMS)}

    def _lower_prefill(self, name: str, size: int) -> jax.stages.Lowered:
        packed = self.prefill_layouts[size].abstract()
        pieces = make_prefill(self._model, self._attention, self.dims, size)
        if name == "prefill_begin":
            return self._jit(pieces.begin).lower(self.weights.ends, packed)
        if name == "prefill_layers":
            return self._lower_layers(pieces, self.layer_groups[name][0], self.weights.ends, packed)
        return self._jit(pieces.end).lower(self.weights.ends, self._hidden(size), packed)

    def _lower_decode(self, name: str, size: int) -> jax.stages.Lowered:
        pieces = make_decode(self._model, self._attention, self.dims, size)
        to_begin = (self.weights.ends, self._state.last_token, self.decode_layouts[size].abstract())
        if name == "decode_begin":
            return self._jit(pieces.begin).lower(*to_begin)
        if name == "decode_layers":
            return self._lower_layers(pieces, self.layer_groups[name][0], *to_begin)
        return self._jit(pieces.end).lower(self.weights.ends, self._hidden(size))

    def _lower_layers(self, pieces: Pieces, group: LayerGroup, *to_begin: Any) -> jax.stages.Lowered:
        x, rows = jax.tree.map(lambda leaf: _located(leaf, self.chips.replicated), jax.eval_shape(pieces.begin, *to_begin))
        layers = self.chips.over_chips(pieces.layers, self._layer_specs)
        run = self._jit(layers, donate=(2, 3), out=(self.chips.replicated, self._pool_format))
        return run.lower(group.params, group.first, x, self._state.pool, rows)

    def _lower_score(self, size: int) -> jax.stages.Lowered:
        return self._jit(make_score(self._model)).lower(self.weights.ends, self._hidden(size), SCORE_LAYOUT.abstract())

    def _lower_greedy(self, size: int) -> jax.stages.Lowered:
        def sample_greedily(ends: Params, last_token: jax.Array, hidden: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
            tokens = greedy(self._model.ends(ends).logits(hidden))
            return last_token.at[slots].set(tokens), tokens

        slots = jax.ShapeDtypeStruct((size,), jnp.int32)
        return self._jit(sample_greedily, donate=1).lower(self.weights.ends, self._state.last_token, self._hidden(size), slots)

    def _lower_sample(self, size: int) -> jax.stages.Lowered:
        def sample_tokens(logits: jax.Array, tokens: jax.Array) -> Sampled:
            return Sampled(tokens)

        return self._lower_sampler(size, sample_tokens)

    def _lower_sample_logprobs(self, size: int) -> jax.stages.Lowered:
        def sample_logprobs(logits: jax.Array, tokens: jax.Array) -> Sampled:
            return Sampled(tokens, *log_probabilities(logits, tokens))

        return self._lower_sampler(size, sample_logprobs)

    def _lower_sampler(self, size: int, result: Callable[[jax.Array, jax.Array], Sampled]) -> jax.stages.Lowered:
        layout = self.sampler_layouts[size]

        def sampler(
            ends: Params, last_token: jax.Array, history: History, hidden: jax.Array, packed: jax.Array
        ) -> tuple[jax.Array, History, Sampled]:
            params = layout.read(packed)
            logits = self._model.ends(ends).logits(hidden)
            tokens = sample(logits, history, params)
            history = count_tokens(history, params["slots"], tokens)
            return last_token.at[params["slots"]].set(tokens), history, result(logits, tokens)

        sampler.__name__ = result.__name__
        state = self._state
        return self._jit(sampler, donate=(1, 2)).lower(
            self.weights.ends, state.last_token, state.history, self._hidden(size), layout.abstract()
        )

    def _lower_history(self, size: int) -> jax.stages.Lowered:
        def history(history: History, packed: jax.Array) -> History:
            host = self.history_layout.read(packed)
            return extend_history(history, host["slot"][0], host["keep"][0], host["prompt"], host["output"])

        return self._jit(history, donate=0).lower(self._state.history, self.history_layout.abstract())

    def _lower_gather(self, size: int) -> jax.stages.Lowered:
        return self._jit(self._gather, out=self.chips.chunk).lower(self._state.pool, jax.ShapeDtypeStruct((size,), jnp.int32))

    def _lower_install(self, size: int) -> jax.stages.Lowered:
        move = self.chips.over_pool_parts(self._pages.install)

        def install(pool: jax.Array, pages: jax.Array, kv: jax.Array) -> jax.Array:
            return move(pool, pages, self.chips.copied(same_bits(kv, pool.dtype)))

        pool, pages = self._state.pool, jax.ShapeDtypeStruct((size,), jnp.int32)
        chunk = _located(jax.eval_shape(self._gather, pool, pages), self.chips.chunk)
        return self._jit(install, donate=0, out=self._pool_format).lower(pool, pages, chunk)

    def _gather(self, pool: jax.Array, pages: jax.Array) -> jax.Array:
        chunk = self.chips.over_pool_parts(self._pages.gather)(pool, pages)
        return self.chips.canonical(same_bits(chunk, self._kv_dtype))

    def _hidden(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._model.shape.embed_dim, size), self._dtype, sharding=self.chips.replicated)

    def _jit(self, function: Callable[..., Any], donate: int | tuple[int, ...] = (), out: Any = None) -> Any:
        """`out`: where the results lie; default: on every chip."""
        return jax.jit(function, donate_argnums=donate, out_shardings=self.chips.replicated if out is None else out)


def _scales_of_file(shape: ModelShape, config: EngineConfig, kv_dtype: jnp.dtype) -> KVScales | None:
    """Raises ValueError where the pool has no use for the file that is named, or where it does not fit the model."""
    if config.kv_scales is None:
        return None
    if kv_dtype != jnp.int8:
        raise ValueError(f"engine.kv_scales is for pools of int8, engine.kv_dtype makes it {kv_dtype}")
    return read_scales(Path(config.kv_scales).expanduser(), shape)


def _located(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding | Format) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
