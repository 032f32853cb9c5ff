"""Rebuilding a tokenizer from GGUF metadata, which holds vocabulary and merges but no tokenizer.json.

Two models: `gpt2`, byte-level BPE whose way of cutting text is only named (`tokenizer.ggml.pre`), and `llama`,
SentencePiece BPE whose merges follow from its scores. The definitions of the named kinds are those of the models'
own tokenizer.json files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sparkgap.catalog.gguf_metadata import Metadata
from sparkgap.catalog.tokenizer import Tokenizer, select_template
from sparkgap.errors import CheckpointError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""

_END_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<EOT>",
    }
)
"""Control tokens that end a turn or a text under any of the supported families, whatever the metadata lists."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = "[一-龥ࠀ-一가-퟿]+"


def _split(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]


def _bytes(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _regex(*patterns: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    return lambda: [*_split(*patterns), _bytes(use_regex=False)]


def _digits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)]


def _falcon() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        _bytes(use_regex=True),
        pre_tokenizers.Digits(individual_digits=False),
        *_split("[0-9][0-9][0-9]"),
    ]


@dataclass(frozen=True)
class _PreTokenization:
    """One kind of `tokenizer.ggml.pre`.

    Attributes:
        steps: makes the pre-tokenizers, the last of which spells bytes.
        nfc: text is normalized to NFC first.
        ignore_merges: a piece that is a token is taken whole.
        add_bos: beginning-of-sequence is added unless metadata says otherwise.
    """

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3_KIND = _PreTokenization(_regex(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_KIND = _PreTokenization(_regex(_QWEN2), nfc=True)
_DIGITS_KIND = _PreTokenization(_digits)
_GPT2_KIND = _PreTokenization(lambda: [_bytes(use_regex=True)])

_PRE_TOKENIZATIONS: Mapping[str, _PreTokenization] = {
    "llama-bpe": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "gpt-2": _GPT2_KIND,
    "tekken": _PreTokenization(_regex(_TEKKEN), ignore_merges=True, add_bos=True),
    "falcon": _PreTokenization(_falcon),
    "deepseek-coder": _PreTokenization(_regex(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "default": _PreTokenization(_regex(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def tokenizer_from_gguf(metadata: Metadata) -> Tokenizer:
    """The tokenizer and chat template that a GGUF file's metadata describes.

    Raises:
        CheckpointError: metadata is missing or inconsistent.
        UnsupportedModelError: a tokenizer model or pre-tokenizer kind that is not supported; the message names it.
    """
    model = metadata.text("tokenizer.ggml.model")
    vocabulary = _Vocabulary(metadata)
    if model == "gpt2":
        backend, add_bos = _byte_level(metadata, vocabulary)
    elif model == "llama":
        backend, add_bos = _sentencepiece(metadata, vocabulary), True
    else:
        raise UnsupportedModelError(f"{metadata.path} has tokenizer model {model!r}; supported: gpt2, llama")
    backend.add_tokens(vocabulary.added_tokens())
    specials = {f"{name}_token": vocabulary.special(name) for name in ("bos", "eos", "unk", "pad")}
    _add_edges(backend, metadata, vocabulary, add_bos)
    template = metadata.text("tokenizer.chat_template", "") or None
    return Tokenizer(
        backend,
        special_tokens={name: text for name, text in specials.items() if text is not None},
        chat_template=select_template(template, str(metadata.path)),
    )


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Ids that end a sequence: those that metadata names, then control tokens known to end a turn or a text."""
    vocabulary = _Vocabulary(metadata)
    named = [vocabulary.id_of(name) for name in ("eos", "eot", "eom")]
    known = [i for i, token in enumerate(vocabulary.tokens) if token in _END_TOKENS and vocabulary.types[i] == _CONTROL]
    return tuple(dict.fromkeys(i for i in (*named, *known) if i is not None))


class _Vocabulary:
    """Tokens, their types, and the special ones by role."""

    _KEYS: Mapping[str, str] = {"unk": "unknown", "pad": "padding"}

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tokens: list[str] = metadata.array("tokenizer.ggml.tokens", str)
        if "tokenizer.ggml.token_type" in metadata:
            self.types: list[int] = metadata.array("tokenizer.ggml.token_type", int)
        else:
            self.types = [_NORMAL] * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise self.damaged(f"{len(self.tokens)} tokens and {len(self.types)} token types")

    def damaged(self, detail: str) -> CheckpointError:
        return CheckpointError(f"{self.metadata.path}: the tokenizer is damaged ({detail}); download or copy it again")

    def ids(self) -> dict[str, int]:
        """Ids by token; of tokens that are spelled alike the first counts."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            ids.setdefault(token, token_id)
        return ids

    def id_of(self, role: str) -> int | None:
        token_id = self.metadata.optional_integer(f"tokenizer.ggml.{self._KEYS.get(role, role)}_token_id")
        if token_id is not None and token_id >= len(self.tokens):
            raise self.damaged(f"the {role} token is {token_id} of {len(self.tokens)} tokens")
        return token_id

    def special(self, role: str) -> str | None:
        token_id = self.id_of(role)
        return None if token_id is None else self.tokens[token_id]

    def added_tokens(self) -> list[AddedToken]:
        """Tokens matched whole in text; control tokens are special."""
        return [
            AddedToken(token, special=kind in (_CONTROL, _UNKNOWN), normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token
        ]


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """A byte-level BPE tokenizer, and whether its kind begins texts with beginning-of-sequence."""
    if "tokenizer.ggml.pre" not in metadata:
        raise UnsupportedModelError(
            f"{metadata.path} does not say how its tokenizer cuts text (tokenizer.ggml.pre); "
            "convert the model again with a current converter"
        )
    kind = metadata.text("tokenizer.ggml.pre")
    definition = _PRE_TOKENIZATIONS.get(kind)
    if definition is None:
        known = ", ".join(sorted(_PRE_TOKENIZATIONS))
        raise UnsupportedModelError(f"{metadata.path} has pre-tokenizer kind {kind!r}; supported: {known}")
    merges = [_merge(line, vocabulary) for line in metadata.array("tokenizer.ggml.merges", str)]
    backend = _backend(vocabulary, merges, ignore_merges=definition.ignore_merges)
    if definition.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(definition.steps())
    backend.decoder = decoders.ByteLevel()
    return backend, definition.add_bos


def _merge(line: str, vocabulary: _Vocabulary) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not (left and space and right) or " " in right:
        raise vocabulary.damaged(f"{line[:40]!r} is not a merge of two tokens")
    return left, right


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> Backend:
    """SentencePiece BPE: the best-scored adjacent pair is merged first; unknown characters fall back to bytes."""
    scores = [float(score) for score in metadata.array("tokenizer.ggml.scores", float)]
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.damaged(f"{len(vocabulary.tokens)} tokens and {len(scores)} scores")
    backend = _backend(
        vocabulary,
        _merges_from_scores(vocabulary, scores),
        unk_token=vocabulary.special("unk"),
        fuse_unk=True,
        byte_fallback=_BYTE in vocabulary.types,
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", "▁")
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two tokens, best score of the whole first (SentencePiece's order)."""
    ids = vocabulary.ids()
    usable = {token for token, i in ids.items() if vocabulary.types[i] == _NORMAL}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token in usable:
        token_id = ids[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                found.append((-scores[token_id], token_id, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _backend(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> Backend:
    # The library raises plain Exception for every fault of its input, so nothing narrower can be caught.
    try:
        return Backend(models.BPE(vocab=vocabulary.ids(), merges=list(merges), **options))
    except Exception as error:
        raise vocabulary.damaged(" ".join(str(error).split())[:200]) from error


def _add_edges(backend: Backend, metadata: Metadata, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """Make the tokenizer begin and end texts as metadata asks."""
    single, specials = ["$A"], []
    for role, place, default in (("bos", 0, add_bos), ("eos", 1, False)):
        token_id = vocabulary.id_of(role)
        if token_id is not None and metadata.flag(f"tokenizer.ggml.add_{role}_token", default):
            single.insert(0 if place == 0 else len(single), f"<{role}>")
            specials.append({"id": f"<{role}>", "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]})
    if specials:
        backend.post_processor = processors.TemplateProcessing(single=" ".join(single), special_tokens=specials)
