"""Streamed text against decoding all tokens at once, for tokens that are any bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.engine.detokenizer import Detokenizer, StopStrings

BYTE_NAMES = sorted(pre_tokenizers.ByteLevel.alphabet())
# Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on, in order.
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
OTHERS = [value for value in range(256) if value not in PRINTABLE]
BYTE_TABLE = {value: chr(value) for value in PRINTABLE} | {v: chr(256 + i) for i, v in enumerate(OTHERS)}


class ByteLevel:
    """A byte-level tokenizer: 256 bytes, some longer tokens and two special ones; counts decoded tokens."""

    def __init__(self):
        encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pieces = ["hello", " world", "né", "日", "本語", "🙂", "\n\n", "\ufffd"]
        names = BYTE_NAMES + [encoder.pre_tokenize_str(piece)[0][0] for piece in pieces]
        names += [encoder.pre_tokenize_str("日本")[0][0][:-1], encoder.pre_tokenize_str("🙂")[0][0][1:]]
        self.tokenizer = HfTokenizer(models.WordLevel({name: i for i, name in enumerate(dict.fromkeys(names))}, "x"))
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<s>", "</s>"])
        self.special_token_ids = frozenset(self.tokenizer.token_to_id(name) for name in ("<s>", "</s>"))
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.num_decoded = 0
        self.largest_decode = 0

    def decode(self, ids, skip_special_tokens=True):
        self.num_decoded += len(ids)
        self.largest_decode = max(self.largest_decode, len(ids))
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id):
        return None

    def of_bytes(self, data):
        return [self.tokenizer.token_to_id(BYTE_TABLE[value]) for value in data]


class ByteFallback:
    """A sentencepiece-like tokenizer: words with a leading-space mark, and one token a byte."""

    special_token_ids = frozenset()

    def __init__(self):
        names = [f"<0x{value:02X}>" for value in range(256)] + ["▁a", "▁hello", "b", "▁", "日", "▁é"]
        self.tokenizer = HfTokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "x"))
        self.tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.vocab_size = len(names)

    def text_of(self, token_id):
        return None

    def decode(self, ids, skip_special_tokens=True):
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


BYTES, FALLBACK = ByteLevel(), ByteFallback()
CATALOG = Tokenizer(BYTES.tokenizer, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
byte_tokens = st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=80)
texts = st.text(st.sampled_from("ab é日本語🙂👨‍👩‍👧\ufffd\n"), max_size=40)


def stream(tokenizer, ids, prompt=(), skip=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [detokenizer.add(token) for token in ids] + [detokenizer.flush()]


@given(byte_tokens, st.booleans())
@settings(deadline=None, max_examples=500)
def test_pieces_add_up_to_the_whole(ids, skip):
    assert "".join(stream(BYTES, ids, skip=skip)) == BYTES.decode(ids, skip_special_tokens=skip)


@given(byte_tokens, byte_tokens, st.booleans())
def test_tokens_that_say_what_they_add_change_nothing(prompt, ids, skip):
    assert stream(CATALOG, ids, prompt, skip) == stream(BYTES, ids, prompt, skip)


def test_what_tokens_add():
    assert CATALOG.text_of(BYTES.tokenizer.token_to_id("hello")) == "hello"
    assert CATALOG.text_of(BYTES.of_bytes("é".encode())[0]) is None
    assert Tokenizer(FALLBACK.tokenizer).text_of(FALLBACK.tokenizer.token_to_id("b")) is None


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=300)
def test_any_bytes_one_by_one(data):
    ids = BYTES.of_bytes(data)
    assert BYTES.decode(ids) == data.decode(errors="replace")
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)


@given(byte_tokens, byte_tokens)
@settings(deadline=None, max_examples=200)
def test_the_prompt_is_context_not_text(prompt, ids):
    context = [i for i in prompt[-8:] if i not in BYTES.special_token_ids]
    before = BYTES.decode(context)
    got = "".join(stream(BYTES, ids, prompt))
    if before.endswith("\ufffd"):
        assert got == BYTES.decode(ids)
    else:
        assert before + got == BYTES.decode(context + ids)


@given(texts)
@settings(deadline=None, max_examples=200)
def test_no_piece_has_half_a_character(text):
    """Every byte a token of its own, with both kinds of tokenizers."""
    for tokenizer in (BYTES, FALLBACK):
        # With byte fallback a replacement character spelled in bytes cannot be told from an invalid byte.
        data = (text if tokenizer is BYTES else text.replace("\ufffd", "")).encode()
        ids = BYTES.of_bytes(data) if tokenizer is BYTES else list(data)
        whole, pieces = tokenizer.decode(ids), stream(tokenizer, ids)
        assert "".join(pieces) == whole
        for index in range(len(data)):
            assert whole.startswith("".join(pieces[: index + 1]))
            complete = data[: index + 1].decode(errors="ignore")
            if "\ufffd" not in text and tokenizer is BYTES:
                assert "".join(pieces[: index + 1]) == complete


@given(st.lists(st.sampled_from([256, 257, 258, 259, 260, 261, 0xE6, 0x97, 0xA5]), max_size=40))
@settings(deadline=None, max_examples=300)
def test_byte_fallback_never_loses_or_repeats(ids):
    """Where runs of byte tokens are valid the text is the whole's; else no word is lost, doubled or moved."""
    got, whole = "".join(stream(FALLBACK, ids)), FALLBACK.decode(ids)
    if "\ufffd" not in whole:
        assert got == whole
    else:
        assert [c for c in got if c in "hlo "] == [c for c in whole if c in "hlo "]


def test_words_keep_the_space_after_the_prompt():
    assert "".join(stream(FALLBACK, [257, 258], prompt=[256])) == " hellob"
    assert "".join(stream(FALLBACK, [257, 258])) == "hellob"


@pytest.mark.parametrize("data", [b"a", b"\xff", "日".encode(), b"\x80", b"\xf0\x9f", "é".encode() + b"\xe6"])
def test_decode_cost_does_not_grow(data):
    tokenizer = ByteLevel()
    ids = tokenizer.of_bytes(data) * 2000
    stream(tokenizer, ids)
    assert tokenizer.largest_decode <= 24
    assert tokenizer.num_decoded <= 24 * len(ids)


stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("ab", max_size=20), stops, st.data())
def test_stop_strings_do_not_depend_on_pieces(text, stop_list, data):
    finder = StopStrings(stop_list)
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stop_list)]
    seen = held_from = 0
    while seen < len(text):
        size = data.draw(st.integers(1, 5))
        arrived = text[: seen + size]
        match = finder.find(arrived, seen)
        expected = next((end for end in ends if end <= len(arrived)), None)
        assert (match.end if match else None) == expected
        if match:
            assert text[match.start : match.end] == match.stop
            assert len(match.stop) == max(len(s) for s in stop_list if text[: match.end].endswith(s))
            return
        held_from = finder.held_from(arrived, held_from)
        prefixes = [n for n in range(1, len(arrived) + 1) if any(s.startswith(arrived[-n:]) for s in stop_list)]
        assert len(arrived) - held_from == max(prefixes, default=0)
        seen += size


class CountingStr(str):
    """A stop string that counts the comparisons with it."""

    compared = 0

    def startswith(self, *arguments):
        CountingStr.compared += 1
        return super().startswith(*arguments)


def test_long_stop_strings_cost_no_more_as_the_text_grows():
    finder = StopStrings([CountingStr("x" * 2000)])
    text, held_from = "", 0
    for piece in "xy" * 500 + "x" * 1000:
        text += piece
        held_from = finder.held_from(text, held_from)
    assert held_from == 1000
    assert CountingStr.compared <= 2 * len(text)
