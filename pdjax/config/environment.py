"""Every environment variable that pdjax reads, one function each. Nothing else in the project looks at the environment."""

from __future__ import annotations

import os


def attention_override() -> str | None:
    """`PDJAX_ATTENTION`: the attention implementation to use in place of the platform's best; None where unset or empty."""
    return os.environ.get("PDJAX_ATTENTION") or None
