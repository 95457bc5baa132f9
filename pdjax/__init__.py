"""pdjax serves large language models in JAX with prefill and decode on separate accelerators."""

from pdjax.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str):
    # Loaded on first use: importing a part of pdjax must not cost the import of jax.
    if name == "LLM":
        from pdjax.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pdjax.api.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pdjax' has no attribute {name!r}")
