"""Expands a llama model in a GGUF file to a float32 folder in Hugging Face's format, for servers that read no GGUF files.

Runs in the environment of such a server, which has torch and transformers, and takes nothing from pdjax:

    python -P peers_model.py FILE.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers


def main(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # The file names its pre-tokenization `smollm`, which transformers does not know: digits are split one by one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    quantized = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A fresh model: the one that was read keeps the mark of its quantized file, and so would the folder.
    described = {name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**described)).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
