"""Models named by their id on the Hugging Face hub, brought by the huggingface_hub package where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def is_hub_id(source: str) -> bool:
    """Whether `source` is written as OWNER/NAME and is no file or folder here."""
    return _ID.fullmatch(source) is not None and not Path(source).exists()


def fetch(model_id: str) -> Path:
    """The folder that holds the model, fetched unless it is in the hub's cache already. No code is fetched.

    Raises ValueError where huggingface_hub is not installed or the hub cannot give the model.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"model source {model_id!r} is neither a file nor a folder here. To fetch it from the Hugging Face hub: pip install pdjax[hub]"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=_WANTED))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"model source {model_id!r} is no file or folder here, and the Hugging Face hub does not give it: {reason}") from error
