"""Text to token ids and back, and chats to prompts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders

from sparkgap.catalog.chat_template import render_template
from sparkgap.catalog.json_files import is_there, missing_file, read_json, read_optional_json
from sparkgap.errors import CheckpointError, PromptError, UnsupportedModelError

_LONG_TEXT_CHARACTERS = 4096
_REPLACEMENT = "\ufffd"
_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        backend: the tokenizer proper.
        special_tokens: texts of `bos_token`, `eos_token`, ...; templates see them by these names.
        chat_template: jinja2 source, None if the model has none.

    Attributes:
        bos_token_id: id of the beginning-of-sequence token.
        eos_token_id: id of the end-of-sequence token.
        special_token_ids: ids that `decode` leaves out.
        chat_template: as given.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._texts: dict[int, str | None] = {}
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face model directory: tokenizer.json and its companions.

        Raises:
            CheckpointError: a file is missing or damaged.
            UnsupportedModelError: there is a tokenizer, and no tokenizer.json.
        """
        path = directory / "tokenizer.json"
        if not is_there(path):
            for other in ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json"):
                if (directory / other).exists():
                    raise UnsupportedModelError(
                        f"{directory} has {other} and no tokenizer.json; save it with transformers to get one"
                    )
            raise missing_file(path)
        read_json(path)
        config = read_optional_json(directory / "tokenizer_config.json")
        specials = {**read_optional_json(directory / "special_tokens_map.json"), **config}
        return cls(
            _load(path),
            special_tokens=_special_texts(specials, directory),
            chat_template=_directory_template(directory, config),
        )

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `from_directory` and transformers read."""
        self._backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {**self._special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer, for incremental decoding (`tokenizers.decoders.DecodeStream`)."""
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text are recognized.

        Args:
            text: any length, also empty.
            add_special_tokens: add the tokens the model wants around a text, such as beginning-of-sequence.

        Raises:
            PromptError: the text has lone surrogates and so is not valid Unicode.
        """
        _check_text(text)
        if len(text) > _LONG_TEXT_CHARACTERS:
            # Other threads of Python go on during the library's batches, and only then.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def text_of(self, token_id: int) -> str | None:
        """What a token adds to any text; None where that depends on the tokens around it.

        Byte-level tokens stand for bytes, whatever stands beside them: those of whole characters add these.
        """
        if not self._is_byte_level:
            return None
        if token_id not in self._texts:
            text = self.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = None if _REPLACEMENT in text else text
        return self._texts[token_id]

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, None if there is no such id."""
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return None if token is None else str(token)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, None if there is none."""
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a chat, by the model's template.

        Args:
            messages: objects with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's turn.
            **variables: further names for the template, such as `tools`.

        Raises:
            PromptError: no template, messages of a wrong shape, or the template's own refusal.
        """
        if self.chat_template is None:
            raise PromptError("this model has no chat template; give a plain prompt instead of messages")
        names = {**self._special_tokens, **variables, "add_generation_prompt": add_generation_prompt}
        text = render_template(self.chat_template, messages, **names)
        _check_text(text)
        return text

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a chat's prompt; special tokens come from the template alone. As `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self.token_to_id(text)


def select_template(template: Any, where: str) -> str | None:
    """The default template of the forms it is stored in: a string, a list of named ones, or an object of them.

    Raises:
        CheckpointError: another form.
    """
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        template = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
    if isinstance(template, dict):
        chosen = template.get("default", next(iter(template.values()), None))
        if isinstance(chosen, str):
            return chosen
    raise CheckpointError(f"{where} has a chat_template of an unknown form; it must be text")


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise PromptError(f"a prompt must be text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt is not valid Unicode: it has a lone surrogate at character {error.start}"
        ) from error


def _load(path: Path) -> tokenizers.Tokenizer:
    # The library raises plain Exception for every fault of a file, so nothing narrower can be caught.
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is not a usable tokenizer ({_one_line(error)}); copy it again") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _special_texts(config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Texts of the named special tokens, which are stored as strings or as objects with `content`."""
    texts = {}
    for name in _NAMED_SPECIALS:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            if not _is_unicode(value):
                raise CheckpointError(f"{directory}: the tokenizer's {name} is not valid Unicode; copy it again")
            texts[name] = value
    return texts


def _is_unicode(text: str) -> bool:
    """False with lone surrogates, which JSON's escapes can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _directory_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if is_there(path):
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise missing_file(path) from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read as UTF-8 text; copy it again") from error
    older = read_optional_json(directory / "chat_template.json")
    return select_template(older.get("chat_template", config.get("chat_template")), str(directory))
