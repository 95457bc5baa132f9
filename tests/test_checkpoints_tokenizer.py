"""Tokenizers and chat templates of Hugging Face folders."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pdjax.api.chat_template import ChatTemplate
from pdjax.api.prompts import PromptReader
from pdjax.api.tokenizer import Tokenizer
from pdjax.checkpoints import TokenizerData, open_checkpoint
from pdjax.checkpoints.hf_tokenizer import read_tokenizer
from tests.fake_backend import CARD
from tests.model_kit import golden_tensors, read_golden, write_folder

VOCAB_SIZE = 300
TEXT = "hello, hé🎉 <tool>\n  x<|end|>"


def byte_level(folder: Path) -> tokenizers.Tokenizer:
    """256 bytes, one merge, three added tokens, a beginning that is put in front."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, "he"])}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def metaspace(folder: Path) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "e", "he", "\u2581he"]
    merges = [("h", "e"), ("\u2581", "he")]
    model = models.BPE({token: i for i, token in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_byte_level_document_encodes_as_the_library_does_and_loses_nothing(tmp_path: Path) -> None:
    library = byte_level(tmp_path)
    library.no_truncation()
    library.no_padding()
    tokenizer = Tokenizer(read_tokenizer(tmp_path, VOCAB_SIZE))
    assert tokenizer.encode(TEXT) == library.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=True) == TEXT.removesuffix("<|end|>")
    assert tokenizer.first_ids == (257,)


def test_a_sentencepiece_document_encodes_as_the_library_does_and_gives_bytes_back(tmp_path: Path) -> None:
    library, tokenizer = metaspace(tmp_path), Tokenizer(read_tokenizer(tmp_path, VOCAB_SIZE))
    assert tokenizer.encode("he é") == library.encode("he é", add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("he é🎉")) == " he é🎉"
    assert tokenizer.first_ids == ()


def test_ids_beyond_the_tokenizer_are_nothing_and_beyond_the_model_are_refused(tmp_path: Path) -> None:
    byte_level(tmp_path)
    tokenizer = Tokenizer(read_tokenizer(tmp_path, VOCAB_SIZE))
    assert tokenizer.vocab_size == VOCAB_SIZE and tokenizer.token_bytes(299) == b""
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer has ids up to 259, the model has embeddings for 259 tokens"):
        read_tokenizer(tmp_path, 259)


def test_a_folder_whose_tokenizer_does_not_fit_its_model_is_not_opened(tmp_path: Path) -> None:
    golden = read_golden("llama")
    byte_level(write_folder(tmp_path, golden.config, golden_tensors(golden)))
    with pytest.raises(ValueError, match=r"the tokenizer has ids up to 259, the model has embeddings for 128 tokens"):
        open_checkpoint(str(tmp_path))


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_special_tokens_and_the_chat_template_come_from_the_settings(tmp_path: Path) -> None:
    byte_level(tmp_path)
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    write_settings(tmp_path, bos_token="<|begin|>", eos_token={"content": "<|end|>", "lstrip": False}, chat_template=template)
    data = read_tokenizer(tmp_path, VOCAB_SIZE)
    assert (data.bos_token_id, data.eos_token_id) == (257, 258) and data.special_ids == {257, 258} and data.added_ids == {259}
    rendered = ChatTemplate.from_data(data)
    assert rendered is not None
    assert rendered.render([{"role": "user", "content": "hi"}], True) == "<|begin|>hi<|end|>"


def test_a_template_in_a_file_of_its_own_comes_first_and_the_default_of_several_counts(tmp_path: Path) -> None:
    byte_level(tmp_path)
    assert read_tokenizer(tmp_path, VOCAB_SIZE).chat_template is None
    write_settings(tmp_path, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}])
    assert read_tokenizer(tmp_path, VOCAB_SIZE).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_tokenizer(tmp_path, VOCAB_SIZE).chat_template == "J"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", r"tokenizer\.json is not readable JSON"),
        ("[]", r"tokenizer\.json holds a list"),
        ('{"model": {"type": "WordPiece", "vocab": {}}}', "a tokenizer of type 'WordPiece' is not supported; supported is 'BPE'"),
        ('{"model": {"type": "BPE"}}', "field vocab should be of type dict but is None"),
        ('{"model": {"vocab": {}}}', "its vocabulary is empty"),
        ('{"model": {"vocab": {"a": "b"}}}', "ids that are no numbers"),
        ('{"model": {"vocab": {"a": -1}}}', "ids that are no numbers"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, document: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(document)
    with pytest.raises(ValueError, match=message):
        read_tokenizer(tmp_path, VOCAB_SIZE)


def test_a_tokenizer_that_the_library_refuses_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}, "added_tokens": []}')
    with pytest.raises(ValueError, match="the model's tokenizer cannot be used"):
        Tokenizer(read_tokenizer(tmp_path, VOCAB_SIZE))


def test_a_folder_with_a_slow_tokenizer_only_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"spm")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: there is no such file; slow tokenizers"):
        read_tokenizer(tmp_path, VOCAB_SIZE)


def test_a_plain_prompt_starts_as_the_tokenizer_says_and_a_conversation_as_its_template_does(tmp_path: Path) -> None:
    byte_level(tmp_path)
    tokenizer = Tokenizer(read_tokenizer(tmp_path, VOCAB_SIZE))
    reader, card = PromptReader(tokenizer), CARD._replace(vocab_size=VOCAB_SIZE)
    prompts = asyncio.run(reader.read([("prompt[0]", "he"), ("prompt[1]", [5])], card))
    assert [prompt.ids for prompt in prompts] == [[257, 256], [5]]
    assert asyncio.run(reader.encode("he", card, "messages")) == [256]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [("gpt-2", ["1234", "Ġa", "b", "c"]), ("llama-bpe", ["123", "4", "Ġabc"]), ("qwen2", ["1", "2", "3", "4", "Ġa", "b", "c"])],
)
def test_words_are_cut_as_each_pre_tokenizer_does(name: str, pieces: list[str]) -> None:
    tokens = (*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "1234", "Ġa", "Ġabc")
    data = TokenizerData(tokens, ("1 2", "12 3", "123 4", "Ġ a"), frozenset(), frozenset(), name, None, None, None)
    assert [tokens[i] for i in Tokenizer(data).encode("1234 abc")] == pieces
