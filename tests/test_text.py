"""Text to tokens and back: tokenizer, chat template, and text that is shown while tokens still come."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdjax.api.chat_template import ChatTemplate
from pdjax.api.detokenizer import TextStream
from pdjax.api.tokenizer import Tokenizer
from pdjax.checkpoints import TokenizerData, open_checkpoint
from pdjax.errors import BadRequest
from tests.goldens import Golden, load_goldens

CAPITAL_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
CAPITAL_IDS = """1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198
1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"""
CAPITAL_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]
GOLDENS = load_goldens()
# UTF-8 bytes that no token of the embedded model stands for; its tokenizer drops them.
UNKNOWN_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def spelled(piece: bytes) -> str:
    """`piece` in GPT-2's byte alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in piece)


def tokenizer_of(pieces: list[bytes], special: list[str] | None = None, added: list[str] | None = None) -> Tokenizer:
    """A tokenizer with token i standing for pieces[i]; special tokens, then added ones, follow."""
    special, added = special or [], added or []
    first = len(pieces)
    return Tokenizer(
        TokenizerData(
            tokens=(*map(spelled, pieces), *special, *added),
            merges=(),
            special_ids=frozenset(range(first, first + len(special))),
            added_ids=frozenset(range(first + len(special), first + len(special) + len(added))),
            pre_tokenizer="smollm",
            chat_template=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def cut_at(data: bytes, borders: list[int]) -> list[bytes]:
    """`data` cut at `borders`, taken modulo its length; empty pieces are allowed."""
    places = [0, *sorted(border % (len(data) + 1) for border in borders), len(data)]
    return [data[start:end] for start, end in zip(places, places[1:])]


@pytest.fixture(scope="module")
def data() -> TokenizerData:
    return open_checkpoint("embedded:smollm2-135m-instruct").tokenizer_data()


@pytest.fixture(scope="module")
def tokenizer(data: TokenizerData) -> Tokenizer:
    return Tokenizer(data)


@pytest.fixture(scope="module")
def template(data: TokenizerData) -> ChatTemplate:
    result = ChatTemplate.from_data(data)
    assert result is not None
    return result


# ---- goldens


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_prompt_ids_equal_the_reference_tokenizers(tokenizer: Tokenizer, template: ChatTemplate, golden: Golden) -> None:
    text = golden.text if golden.messages is None else template.render(golden.messages, add_generation_prompt=True)
    assert text is not None
    assert tokenizer.encode(text) == golden.prompt_ids
    assert tokenizer.decode(golden.prompt_ids) == text


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_a_streamed_answer_equals_its_text_as_a_whole(tokenizer: Tokenizer, golden: Golden) -> None:
    stream = TextStream(tokenizer)
    shown = [stream.push(token) for token in golden.output_ids]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) + stream.finish() == tokenizer.decode(golden.output_ids, skip_special_tokens=True)


def test_the_goldens_cover_what_they_are_for() -> None:
    lengths = [len(golden.prompt_ids) for golden in GOLDENS]
    assert len(GOLDENS) >= 24 and len({golden.name for golden in GOLDENS}) == len(GOLDENS)
    assert {1, 15, 16, 17, 31, 32, 33, 511, 512, 513} <= set(lengths) and max(lengths) > 1500
    for golden in GOLDENS:
        assert (golden.messages is None) != (golden.text is None)
        assert len(golden.output_ids) == 24 or golden.output_ids[-1] == 2
        assert golden.first_top5[0][0] == golden.output_ids[0]
        assert [logprob for _, logprob in golden.first_top5] == sorted((lp for _, lp in golden.first_top5), reverse=True)


# ---- tokenizer


def test_the_reference_conversation_becomes_its_37_ids(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    assert tokenizer.encode(template.render(CAPITAL_MESSAGES, add_generation_prompt=True)) == [int(i) for i in CAPITAL_IDS.split()]
    assert tokenizer.decode(CAPITAL_ANSWER) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.decode(CAPITAL_ANSWER, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1999", ["1", "9", "9", "9"]),
        ("a  12", ["a", "  ", "1", "2"]),
        ("x½", ["x", "½"]),
        (" the end", [" the", " end"]),
        ("don't", ["don", "'t"]),
        ("", []),
        ("a<|im_end|>b", ["a", "<|im_end|>", "b"]),
        ("\x04a", ["a"]),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(tokenizer: Tokenizer, text: str, pieces: list[str]) -> None:
    assert [tokenizer.token_text(token) for token in tokenizer.encode(text)] == pieces


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="\U0001f469\u200d\U0001f469\u200d\U0001f467 12 \r\n\t é")
def test_any_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    text = "".join(char for char in text if UNKNOWN_BYTES.isdisjoint(char.encode()))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()


def test_token_bytes_equal_what_the_tokenizers_package_decodes(data: TokenizerData, tokenizer: Tokenizer) -> None:
    decoder = tokenizers.decoders.ByteLevel()
    for token in range(17, tokenizer.vocab_size, 23):
        assert tokenizer.token_text(token) == decoder.decode([data.tokens[token]])


def test_the_vocabulary_counts_every_token_and_knows_the_special_ones(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert [tokenizer.is_special(token) for token in (0, 2, 16, 17, 49151)] == [True, True, True, False, False]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_added_tokens_are_recognised_whole_and_shown() -> None:
    tokenizer = tokenizer_of([b"a", b"<", b"t", b">"], special=["<end>"], added=["<t>"])
    assert tokenizer.encode("a<t><end>") == [0, 5, 4]
    assert tokenizer.decode([0, 5, 4], skip_special_tokens=True) == "a<t>"


@pytest.mark.parametrize("token", [-1, 49152, 10**12])
def test_an_id_outside_the_vocabulary_is_refused_with_the_limit(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(BadRequest, match=f"token id {token} is outside the vocabulary, 0 to 49151"):
        tokenizer.decode([5, token])


def test_text_with_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match=r"lone surrogate '\\ud83d' at character 2"):
        tokenizer.encode("ab\ud83d")


def test_an_unknown_pre_tokenizer_is_named(data: TokenizerData) -> None:
    with pytest.raises(ValueError, match="pre-tokenizer 'tekken' is not known; known: smollm, gpt-2"):
        Tokenizer(data._replace(pre_tokenizer="tekken"))


def test_a_vocabulary_with_foreign_characters_is_refused(data: TokenizerData) -> None:
    with pytest.raises(ValueError, match="token 1 of the vocabulary, '▁the'"):
        Tokenizer(data._replace(tokens=("a", "▁the"), merges=(), special_ids=frozenset()))


# ---- chat template


def test_a_system_message_replaces_the_default_one(template: ChatTemplate) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(messages, add_generation_prompt=False) == expected
    assert template.render(messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_text_parts_are_joined_by_newlines(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    joined = [{"role": "user", "content": "What is the capital\nof France?"}]
    assert template.render([{"role": "user", "content": parts}], True) == template.render(joined, True)


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([], "messages", "must not be empty"),
        (["hello"], "messages[0]", "must be an object, got str"),
        ([{"content": "a"}], "messages[0].role", "must be a string"),
        ([{"role": "user"}], "messages[0].content", "must be a string or a list of text parts, got NoneType"),
        ([{"role": "user", "content": 5}], "messages[0].content", "got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]", "is of type 'image_url'; only 'text'"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", "is of type 'str'; only 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be a string"),
    ],
)
def test_malformed_messages_are_refused_by_field(template: ChatTemplate, messages: list, param: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        template.render(messages, add_generation_prompt=True)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "refuses these messages"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_bad_request(source: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        ChatTemplate(source).render(CAPITAL_MESSAGES, add_generation_prompt=True)


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="chat template does not compile, line 2"):
        ChatTemplate("{% if true %}\n{% endfor %}")


def test_templates_find_the_environment_that_they_are_written_for(data: TokenizerData) -> None:
    source = "{% for m in messages %}\n  {{ m | tojson }}{% break %}\n{% endfor %}\n{{ bos_token }}|{{ strftime_now('%Y') | length }}"
    template = ChatTemplate.from_data(data._replace(chat_template=source))
    assert template is not None
    rendered = template.render([{"role": "user", "content": "<é>"}, {"role": "user", "content": "2"}], add_generation_prompt=False)
    assert rendered == '  {"role": "user", "content": "<é>"}<|im_start|>|4'


def test_a_checkpoint_without_a_template_has_none(data: TokenizerData) -> None:
    assert ChatTemplate.from_data(data._replace(chat_template=None)) is None


# ---- text stream


def stream_of(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str]]:
    """What is shown after each piece, from a stream that has not been finished."""
    unique = list(dict.fromkeys(pieces))
    stream = TextStream(tokenizer_of(unique), stop)
    return stream, [stream.push(unique.index(piece)) for piece in pieces]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and stop string of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(matches, key=len)
            return end - len(longest), longest
    return None


def possible_start(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)


def test_an_emoji_split_over_four_tokens_appears_whole_with_the_last() -> None:
    stream, shown = stream_of([b"a\xf0", b"\x9f", b"\x8e", b"\x89b"])
    assert shown == ["a", "", "", "🎉b"] and stream.finish() == ""


def test_half_a_character_at_the_end_becomes_a_replacement_only_when_finished() -> None:
    stream, shown = stream_of([b"caf", b"\xc3"])
    assert shown == ["caf", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_stop_string_across_three_tokens_is_never_partly_shown() -> None:
    stream, shown = stream_of([b"one\n", b"\nUs", b"er: two"], ("\n\nUser:",))
    assert shown == ["one", "", ""]
    assert stream.stopped == "\n\nUser:"
    assert stream.push(0) == "" and stream.finish() == ""


def test_what_only_looked_like_a_stop_string_is_shown_as_soon_as_that_is_clear() -> None:
    stream, shown = stream_of([b"aa", b"a", b"ab", b"c"], ("aac",))
    assert shown == ["", "a", "aaab", "c"]
    assert stream.stopped is None and stream.finish() == ""


def test_a_beginning_of_a_stop_string_at_the_end_is_shown_when_finished() -> None:
    stream, shown = stream_of([b"end <", b"/s"], ("</s>",))
    assert shown == ["end ", ""] and stream.finish() == "</s" and stream.stopped is None


def test_the_stop_string_that_is_complete_first_wins() -> None:
    stream, shown = stream_of([b"xabcd"], ("abcd", "bc"))
    assert shown == ["xa"] and stream.stopped == "bc"
    stream, shown = stream_of([b"xabc"], ("bc", "abc"))
    assert shown == ["x"] and stream.stopped == "abc"


def test_special_tokens_are_shown_only_where_that_is_wanted() -> None:
    tokenizer = tokenizer_of([b"a"], special=["<end>"])
    hiding, showing = TextStream(tokenizer), TextStream(tokenizer, skip_special_tokens=False)
    assert [hiding.push(0), hiding.push(1)] == ["a", ""]
    assert [showing.push(0), showing.push(1)] == ["a", "<end>"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest, match="stop strings must not be empty"):
        TextStream(tokenizer_of([b"a"]), ("a", ""))


def test_text_offsets_count_the_characters_before_each_token() -> None:
    pieces = [b"ab", b"\xc3", b"\xa9<", b"c"]
    stream = TextStream(tokenizer_of(pieces), ("<stop>",))
    offsets = []
    for token in range(4):
        offsets.append(stream.num_chars)
        stream.push(token)
    assert offsets == [0, 2, 2, 4]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])), borders=st.lists(st.integers(0, 400), max_size=12))
def test_any_split_of_any_text_shows_every_character_as_soon_as_it_is_complete(text: str, borders: list[int]) -> None:
    pieces = cut_at(text.encode(), borders)
    stream, shown = stream_of(pieces)
    for i in range(len(pieces)):
        assert "".join(shown[: i + 1]) == b"".join(pieces[: i + 1]).decode(errors="ignore")
    assert stream.finish() == ""


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(st.sampled_from([0x41, 0x80, 0xA0, 0xC3, 0xE2, 0xED, 0xF0, 0x9F, 0xFF]), max_size=24),
    borders=st.lists(st.integers(0, 30), max_size=12),
)
def test_any_split_of_broken_utf8_gives_the_same_replacements(data: list[int], borders: list[int]) -> None:
    stream, shown = stream_of(cut_at(bytes(data), borders))
    assert "".join(shown) + stream.finish() == bytes(data).decode(errors="replace")


@settings(max_examples=1000, deadline=None)
@given(
    text=st.text("abé", max_size=30),
    stops=st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple),
    borders=st.lists(st.integers(0, 60), max_size=20),
)
@example(text="aabaabaaab", stops=("aabaaab",), borders=list(range(10)))
def test_any_stop_strings_are_found_and_never_partly_shown(text: str, stops: tuple[str, ...], borders: list[int]) -> None:
    pieces = cut_at(text.encode(), borders)
    stream, shown = stream_of(pieces, stops)
    for i in range(len(pieces)):
        so_far = b"".join(pieces[: i + 1]).decode(errors="ignore")
        match = first_stop(so_far, stops)
        expected = so_far[: len(so_far) - possible_start(so_far, stops)] if match is None else so_far[: match[0]]
        assert "".join(shown[: i + 1]) == expected
    match = first_stop(text, stops)
    assert stream.stopped == (None if match is None else match[1])
    assert "".join(shown) + stream.finish() == (text if match is None else text[: match[0]])
