"""Varied strings for tokenizer tests, the same ones at every run."""

# ruff: noqa: E501, RUF001

import random

_PIECES = [
    "Hello world", "don't", "I'LL", "it's we've", "def f(x):\n    return x**2\n", "\tif (a != b) {\n\t\tfoo();\n\t}",
    "    indented", "  ", "   ", "\n\n\n", "\r\n", "\t\t", " \n ", "\u00a0", "\u3000", "\u200b", "123", "1234567",
    "3.14159", "2,048", "٣٤٥", "½²³", "Ⅷ", "一二三", "你好，世界！", "日本語のテキスト", "한국어 문장", "العربية",
    "हिन्दी", "ไทย", "é", "e\u0301", "a\u0328\u0301", "ñ", "Ångström", "ﬁ", "👍", "👨‍👩‍👧‍👦", "🇫🇷", "🏳️‍🌈",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "user\n", "https://example.org/a?b=c&d=1#e",
    "{\"k\": [1, 2, null]}", "<html>&amp;</html>", "$100", "50%", "C++", "a_b-c.d", "...", "!!!", "??", "—–-", "“”‘’",
    "x" * 40, "=" * 30, "ABCdefGHI", "camelCaseWords", "SCREAMING_CASE", "\u0000", "\u007f", "\ufeff", "\ufffd", "𝔘𝔫𝔦", "𒀀",
    "'", "''", "'s", "'re'll", " 's", "<s>", "</s>", "[INST]", "▁", "▁▁x", "", "µ", "ǅ", "İstanbul", "ß", "ſ",
]  # fmt: skip


def varied_texts(count: int = 1000, *, seed: int = 0) -> list[str]:
    """Each piece alone, then random joins of pieces and of characters of all planes (surrogates left out)."""
    rng = random.Random(seed)
    texts = list(_PIECES)
    while len(texts) < count:
        if rng.random() < 0.15:
            points = [rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]) for _ in range(12)]
            texts.append("".join(map(chr, points)))
        else:
            texts.append(rng.choice(["", " ", "\n"]).join(rng.choices(_PIECES, k=rng.randint(2, 8))))
    return texts[:count]
