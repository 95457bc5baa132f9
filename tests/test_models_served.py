"""A Hugging Face folder as a user serves it: prefill and decode apart, text in and out."""

from __future__ import annotations

import json
from pathlib import Path

from pdjax.api.sampling_params import SamplingParams
from pdjax.llm import LLM
from tests.model_kit import golden_tensors, quick_compilation, read_golden, write_folder

SMALL = (
    "engine.compile_cache=null",
    "model.max_context_tokens=128",
    "engine.page_size=4",
    "engine.num_pages=48",
    "engine.max_running=1",
    "engine.max_prefill_seqs=1",
    "engine.prefill_buckets=[24]",
    "engine.decode_buckets=[1]",
    "engine.transfer_buckets=[4]",
    "scheduler.max_step_tokens=24",
)


def test_a_folder_is_served_and_answers_as_transformers_does(tmp_path: Path) -> None:
    golden = read_golden("gemma3")
    folder = write_folder(tmp_path / "small-gemma", golden.config | {"eos_token_id": 127}, golden_tensors(golden), shards=2)
    vocab = {"<eos>": 127, "<turn>": 126} | {chr(ord("!") + i): i for i in range(90)}
    added = [{"id": i, "content": token, "special": True, "normalized": False} for token, i in (("<turn>", 126), ("<eos>", 127))]
    added = [entry | {"single_word": False, "lstrip": False, "rstrip": False} for entry in added]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    template = "{% for message in messages %}<turn>{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))
    with quick_compilation(tmp_path / "programs"), LLM(overrides=[f"model.source={folder}", *SMALL]) as llm:
        greedy = SamplingParams(max_tokens=32, temperature=0.0)
        (completion,) = llm.generate([golden.prompt], greedy)
        assert [each.token for each in completion.tokens] == golden.answer
        (chat,) = llm.chat([{"role": "user", "content": "hi!"}], greedy)
        assert chat.prompt_token_ids == [126, *(ord(char) - ord("!") for char in "hi!")]
        assert len(chat.tokens) == 32 or chat.finish_reason == "stop"
