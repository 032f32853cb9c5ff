import itertools
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
import transformers
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sparkgap.catalog.gguf_container import open_container
from sparkgap.catalog.gguf_metadata import Metadata
from sparkgap.catalog.gguf_tokenizer import end_token_ids, tokenizer_from_gguf
from sparkgap.catalog.tokenizer import Tokenizer
from sparkgap.errors import CheckpointError, PromptError, UnsupportedModelError

from .builders import random_weights, write_gguf
from .texts import varied_texts

CONTROL, USER_DEFINED, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained() -> Backend:
    """A small byte-level BPE whose words were cut as GPT-2 cuts them."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(varied_texts(300, seed=1), trainer)
    return backend


def vocabulary(backend: Backend) -> tuple[list[str], list[str]]:
    model = json.loads(backend.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def from_metadata(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    path = tmp_path / "t.gguf"
    write_gguf(path, random_weights(tied=True), metadata=metadata, tokenizer=False)
    return tokenizer_from_gguf(Metadata(open_container(path)))


def byte_level_metadata(backend: Backend, pre: str, specials: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    tokens, merges = vocabulary(backend)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *specials],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL] * len(specials),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


# The default model.


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(Metadata(open_container(default_model_path)))


@pytest.mark.model
def test_default_model_has_the_ids_of_its_definition(default_model_path: Path, default_tokenizer: Tokenizer) -> None:
    """The definition in SmolLM2's tokenizer.json: single digits, then GPT-2's byte-level cutting."""
    fields = GGUFReader(default_model_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=[AddedToken(t, special=True) for t in tokens[:17]]
    )
    for text in varied_texts(1000):
        ids = reference(text)["input_ids"]
        assert default_tokenizer.encode(text) == ids, text
        for skip in (True, False):
            assert default_tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert default_tokenizer.special_token_ids == frozenset(range(17))


@pytest.mark.model
def test_default_model_against_transformers_own_conversion(
    default_model_path: Path, default_tokenizer: Tokenizer
) -> None:
    """transformers does not cut digits apart (its pre-tokenizer is ByteLevel alone): equal everywhere else."""
    reference = transformers.AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    compared = 0
    for text in varied_texts(1000):
        if not any(char.isnumeric() for char in text):
            compared += 1
            assert default_tokenizer.encode(text) == reference(text)["input_ids"], text
    assert compared > 400
    for messages in CHATS:
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert default_tokenizer.render_chat(messages, add_generation_prompt=prompt) == expected


@pytest.mark.model
def test_default_model_ends_and_begins(default_model_path: Path, default_tokenizer: Tokenizer) -> None:
    assert end_token_ids(Metadata(open_container(default_model_path))) == (2, 0)
    assert (default_tokenizer.bos_token_id, default_tokenizer.eos_token_id) == (1, 2)
    assert default_tokenizer.encode("") == []
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.id_to_token(1) == "<|im_start|>"
    assert default_tokenizer.id_to_token(49152) is None
    assert default_tokenizer.id_to_token(-1) is None


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n"}],
    [
        {"role": "user", "content": " <b>&'\"</b> "},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": ""},
    ],
]


# Byte-level BPE from metadata.

SPLITS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "falcon": [r"[\p{P}$+<=>^`|~]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def pieces_by_regex(patterns: Sequence[str], text: str) -> list[str]:
    """Each pattern cuts what the ones before it left, matches and gaps alike (another regex engine than ours)."""
    parts = [text]
    for pattern in patterns:
        compiled = regex.compile(pattern)
        cut = []
        for part in parts:
            end = 0
            for match in compiled.finditer(part):
                cut += [part[end : match.start()], match.group()]
                end = match.end()
            cut.append(part[end:])
        parts = [part for part in cut if part]
    return parts


def known_to_both_unicode_versions(text: str) -> bool:
    return all(unicodedata.category(char) != "Cn" for char in text) and not regex.search(
        r"[\U00010000-\U0010FFFF]", text
    )


@pytest.mark.parametrize("kind", SPLITS)
def test_every_kind_cuts_text_as_its_regular_expressions(tmp_path: Path, trained: Backend, kind: str) -> None:
    tokenizer = from_metadata(tmp_path, byte_level_metadata(trained, kind))
    pre_tokenizer = tokenizer.backend.pre_tokenizer
    compared = 0
    for text in varied_texts(600):
        # Falcon cuts digits after bytes are spelled, and some bytes are spelled as digits such as U+00B2.
        if known_to_both_unicode_versions(text) and (kind != "falcon" or text.isascii()):
            compared += 1
            found = [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]
            assert found == pieces_by_regex(SPLITS[kind], text), text
    assert compared > (20 if kind == "falcon" else 100)


@pytest.mark.parametrize("kind", SPLITS)
def test_every_kind_gives_text_back(tmp_path: Path, trained: Backend, kind: str) -> None:
    tokenizer = from_metadata(tmp_path, byte_level_metadata(trained, kind))
    for text in varied_texts(300):
        expected = unicodedata.normalize("NFC", text) if kind == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


def llama3_like(trained: Backend) -> transformers.PreTrainedTokenizerFast:
    tokens, merges = vocabulary(trained)
    model = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=[tuple(m.split(" ")) for m in merges],
        ignore_merges=True,
    )
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    specials = ["<|begin_of_text|>", "<|eot_id|>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", len(tokens))]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1])


def qwen2_like(trained: Backend) -> transformers.PreTrainedTokenizerFast:
    tokens, merges = vocabulary(trained)
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return tokenizer


@pytest.mark.parametrize("make", [llama3_like, qwen2_like])
def test_saved_tokenizers_have_the_ids_of_transformers(tmp_path: Path, trained: Backend, make: Any) -> None:
    reference = make(trained)
    reference.chat_template = TEMPLATE
    reference.save_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.eos_token_id == reference.eos_token_id
    for text in [*varied_texts(400), *reference.all_special_tokens, f"a{reference.eos_token} b"]:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == reference.encode(text, add_special_tokens=add), text
        ids = reference.encode(text)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for messages in CHATS:
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=TOOLS)
        assert ours.render_chat(messages, tools=TOOLS) == expected
        ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == ids


@pytest.mark.parametrize(
    ("kind", "make", "specials"),
    [
        ("llama-bpe", llama3_like, ["<|begin_of_text|>", "<|eot_id|>"]),
        ("qwen2", qwen2_like, ["<|endoftext|>", "<|im_end|>"]),
    ],
)
def test_gguf_twin_of_a_saved_tokenizer(
    tmp_path: Path, trained: Backend, kind: str, make: Any, specials: list[str]
) -> None:
    reference = make(trained)
    first = len(vocabulary(trained)[0])
    assert [reference.convert_tokens_to_ids(token) for token in specials] == [first, first + 1]
    metadata = byte_level_metadata(trained, kind, specials, bos_token_id=first, eos_token_id=first + 1)
    ours = from_metadata(tmp_path, metadata)
    for text in [*varied_texts(400), *specials, f"a{specials[1]} b"]:
        assert ours.encode(text) == reference.encode(text), text
    assert ours.special_token_ids == {first, first + 1}


def test_edges_follow_metadata(tmp_path: Path, trained: Backend) -> None:
    first = len(vocabulary(trained)[0])
    options = {"bos_token_id": first, "eos_token_id": first + 1}
    plain = from_metadata(tmp_path, byte_level_metadata(trained, "smollm", ["<b>", "<e>"], **options))
    body = plain.encode("text")
    both = {**options, "add_bos_token": True, "add_eos_token": True}
    ours = from_metadata(tmp_path, byte_level_metadata(trained, "smollm", ["<b>", "<e>"], **both))
    assert ours.encode("text") == [first, *body, first + 1]
    assert ours.encode("text", add_special_tokens=False) == body
    assert ours.encode("") == [first, first + 1]
    none = {**options, "add_bos_token": False}
    ours = from_metadata(tmp_path, byte_level_metadata(trained, "llama-bpe", ["<b>", "<e>"], **none))
    assert ours.encode("text")[0] != first


def test_user_defined_tokens_stay_whole_and_visible(tmp_path: Path, trained: Backend) -> None:
    metadata = byte_level_metadata(trained, "qwen2", ["<think>"])
    metadata["tokenizer.ggml.token_type"][-1] = USER_DEFINED
    ours = from_metadata(tmp_path, metadata)
    ids = ours.encode("a<think>b")
    assert len(vocabulary(trained)[0]) in ids
    assert ours.decode(ids) == "a<think>b"
    assert not ours.special_token_ids


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"tokenizer.ggml.pre": "jais"}, UnsupportedModelError, "'jais'"),
        ({"tokenizer.ggml.pre": None}, UnsupportedModelError, r"tokenizer\.ggml\.pre"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, CheckpointError, "2 token types"),
        ({"tokenizer.ggml.merges": ["abc"]}, CheckpointError, "'abc'"),
        ({"tokenizer.ggml.merges": ["unknown pair"]}, CheckpointError, "damaged"),
        ({"tokenizer.ggml.eos_token_id": 99999}, CheckpointError, "99999"),
        ({"tokenizer.ggml.tokens": None}, CheckpointError, r"tokenizer\.ggml\.tokens"),
    ],
)
def test_unusable_metadata_is_named(
    tmp_path: Path, trained: Backend, change: dict[str, Any], error: type[Exception], word: str
) -> None:
    metadata = {**byte_level_metadata(trained, "smollm"), **change}
    with pytest.raises(error, match=word):
        from_metadata(tmp_path, {key: value for key, value in metadata.items() if value is not None})


# SentencePiece BPE from metadata.


@pytest.fixture(scope="module")
def pieces() -> list[tuple[str, float, int]]:
    """(piece, score, type): specials, 256 bytes, learned pieces from best to worst, then single characters."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator(
        varied_texts(300, seed=2), trainers.BpeTrainer(vocab_size=600, limit_alphabet=120, show_progress=False)
    )
    learned, merges = vocabulary(backend)
    merged = ["".join(m.split(" ")) for m in merges]
    singles = [token for token in learned if len(token) == 1]
    found: list[tuple[str, float, int]] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    names = dict.fromkeys([*merged, *singles])
    return found + [(name, -float(rank), NORMAL) for rank, name in enumerate(names)]


def sentencepiece_metadata(pieces: list[tuple[str, float, int]], **more: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_encode(pieces: list[tuple[str, float, int]], text: str) -> list[int]:
    """SentencePiece's rule, written out: merge the adjacent pair that makes the best piece, leftmost first."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids(tmp_path: Path, pieces: list[tuple[str, float, int]], prefix: bool) -> None:
    ours = from_metadata(tmp_path, sentencepiece_metadata(pieces, add_space_prefix=prefix))
    specials = ("<s>", "</s>", "<unk>")
    for text in varied_texts(300):
        if any(special in text for special in specials):
            continue
        marked = f" {text}" if prefix and text else text
        ids = ours.encode(text)
        assert ids == [1, *sentencepiece_encode(pieces, marked)], text
        assert ours.decode(ids) == text.replace("▁", " ")
    body = ours.encode("a</s>b", add_special_tokens=False)
    space = " " if prefix else ""
    assert body == [*sentencepiece_encode(pieces, space + "a"), 2, *sentencepiece_encode(pieces, space + "b")]


# Directories.


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model"):
        Tokenizer.from_directory(tmp_path)
    for content in ('{"model": {"type": "Nothing"}}', "{", "[]", '{"version": "1.0"}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.from_directory(tmp_path)


def test_special_tokens_that_are_no_text(tmp_path: Path, trained: Backend) -> None:
    llama3_like(trained).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "\ud800"}))
    with pytest.raises(CheckpointError, match="eos_token is not valid Unicode"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("place", ["string", "list", "jinja", "json"])
def test_every_place_of_a_chat_template(tmp_path: Path, trained: Backend, place: str) -> None:
    llama3_like(trained).save_pretrained(tmp_path)
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    if place in ("string", "list"):
        config_path.write_text(json.dumps({**config, "chat_template": "yes" if place == "string" else named}))
    elif place == "jinja":
        (tmp_path / "chat_template.jinja").write_text("yes")
    else:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "yes"}))
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "yes"


def test_truncation_and_padding_of_a_saved_tokenizer_are_off(tmp_path: Path, trained: Backend) -> None:
    reference = llama3_like(trained)
    reference.backend_tokenizer.enable_truncation(4)
    reference.backend_tokenizer.enable_padding(length=64)
    reference.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "Hello world, again and again"
    assert Tokenizer.from_directory(tmp_path).encode(text) == llama3_like(trained).encode(text)


# Texts and chats that cannot be encoded.

TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {}}}]
TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(n=0) %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }}|{{ message['role'] | upper }}
{% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}ASSISTANT: {% endif %}
"""


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(Backend(models.BPE(vocab={"a": 0}, merges=[])), chat_template=template)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)
def test_messages_of_a_wrong_shape(messages: Any) -> None:
    with pytest.raises(PromptError, match="messages"):
        with_template("x").render_chat(messages)


def test_text_parts_are_joined() -> None:
    template = "{{ messages[0].content }}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_template(template).render_chat([{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ nothing.there }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "[Rr]ange"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ 2 ** 10000000000 }}", "too large"),
        ("{{ cycler() }}", "at least one"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested"),
    ],
)
def test_template_errors_carry_the_templates_words(template: str, word: str) -> None:
    with pytest.raises(PromptError, match=word) as caught:
        with_template(template).render_chat(CHATS[0])
    assert "\n" not in str(caught.value)


def test_no_template() -> None:
    with pytest.raises(PromptError, match="no chat template"):
        with_template(None).render_chat(CHATS[0])


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=20))
def test_any_text_is_encoded_or_refused(text: str) -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    valid = not any(0xD800 <= ord(char) < 0xE000 for char in text)
    if valid:
        tokenizer.encode(text)
        return
    with pytest.raises(PromptError, match="surrogate"):
        tokenizer.encode(text)
    with pytest.raises(PromptError, match="surrogate"):
        tokenizer.render_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("template", [5, [5], [{"name": [], "template": 5}], {"default": None}, [[]]])
def test_chat_templates_of_no_known_form(tmp_path: Path, trained: Backend, template: Any) -> None:
    llama3_like(trained).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match="chat_template of an unknown form"):
        Tokenizer.from_directory(tmp_path)


def test_long_texts_are_encoded_like_short_ones(trained: Backend) -> None:
    tokenizer = Tokenizer(trained)
    text = "abc \u00e9\u65e5 \n" * 1000
    assert tokenizer.encode(text) == trained.encode(text).ids
    assert tokenizer.encode(text) == tokenizer.encode(text[:4000]) + tokenizer.encode(text[4000:])
