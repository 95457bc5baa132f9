"""Models of any shape without a checkpoint, for measurements: weights are drawn, text is bytes."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np

from pdjax.checkpoints.base import Checkpoint, TokenizerData
from pdjax.checkpoints.hf import read_config
from pdjax.checkpoints.hf_config import read_shape
from pdjax.checkpoints.named_shapes import named_shape

_BLOCK = 1_000_003
"""Values drawn of each weight, and repeated from there on. A prime, so that no two rows of a matrix are alike."""

_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class RandomCheckpoint(Checkpoint):
    """A model whose weights are the same in every process. No token ends its answers.

    Its tokens 0 to 255 are the bytes; those behind them, which no text becomes, stand for their own number.
    """

    def __init__(self, shape_name: str):
        is_file = shape_name.endswith(".json")
        self.shape = read_shape(read_config(Path(shape_name))) if is_file else named_shape(shape_name)
        if self.shape.vocab_size < 256:
            raise ValueError(f"{shape_name}: random weights need a vocabulary of at least 256 tokens, it has {self.shape.vocab_size}")
        self.name = Path(shape_name).parent.name or "random" if is_file else shape_name
        self.fingerprint = f"random:{hashlib.sha256(repr(self.shape).encode()).hexdigest()}"
        self.eos_token_ids = ()

    def tokenizer_data(self) -> TokenizerData:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = iter(range(256, 512))
        spelled = [chr(byte if byte in printable else next(others)) for byte in range(256)]
        space = spelled[ord(" ")]
        tokens = (*spelled, *(f"{space}{number}" for number in range(256, self.shape.vocab_size)))
        return TokenizerData(tokens, (), frozenset(), frozenset(), "gpt-2", _CHAT_TEMPLATE, None, None)

    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        """Norms are ones (zeros where a family adds one to them), biases zeros, matrices normal with the usual spread of their inputs."""
        if path.endswith("norm"):
            target[...] = 0 if self.shape.family in ("gemma2", "gemma3") else 1
        elif path.endswith("bias"):
            target[...] = 0
        else:
            rng = np.random.default_rng(zlib.crc32(f"{path}:{layer}".encode()))
            block = (rng.standard_normal(min(_BLOCK, target.size), np.float32) / np.sqrt(target.shape[-1])).astype(target.dtype)
            flat = target.reshape(-1)
            for start in range(0, flat.size, len(block)):
                flat[start : start + len(block)] = block[: flat.size - start]
