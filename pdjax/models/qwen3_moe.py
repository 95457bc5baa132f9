"""Qwen 3 with a mixture of experts in place of the MLP."""

from __future__ import annotations

from pdjax.models import mixtral, qwen3


class Block(qwen3.QkNorms, mixtral.Block):
    """One layer: attention with normed queries and keys, and experts, each behind a norm."""
