"""Chat templates, rendered as Hugging Face renders them: jinja2's immutable sandbox and a few additions."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sparkgap.catalog.keys import shown
from sparkgap.errors import PromptError

_LARGEST_POWER_BITS = 4096


def render_template(template: str, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
    """Render a chat.

    Args:
        template: jinja2 source.
        messages: the chat; see `check_messages` for its shape.
        **variables: further names the template sees, such as `add_generation_prompt` or `tools`.

    Raises:
        PromptError: messages of a wrong shape, a faulty template, or a template that refuses the messages (with
            its own words).
    """
    chat = check_messages(messages)
    if "messages" in variables:
        raise PromptError("the template's variables must not have messages: they are given by themselves")
    try:
        return _compiled(template).render({"tools": None, "documents": None, **variables, "messages": chat})
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(f"the model's chat template is not valid jinja2 (line {error.lineno}: {error})") from error
    except Exception as error:
        # A template is somebody else's program: it can raise anything.
        detail = " ".join(str(error).split()) or type(error).__name__
        raise PromptError(f"the model's chat template refused the messages: {detail}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of a chat in the shape templates take: text content, and no keys that are None.

    `content` may be a string or a list of `{"type": "text", "text": ...}` parts, which are joined by newlines
    (as vLLM joins them for templates that take strings). It may be missing or None beside `tool_calls`.

    Raises:
        PromptError: naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError("messages must be a non-empty list of objects with role and content")
    return [_checked(message, number) for number, message in enumerate(messages)]


def _checked(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{where} must have a role such as user, got {role!r}")
    checked = {str(key): value for key, value in message.items() if value is not None}
    content = checked.get("content")
    if content is None:
        if not checked.get("tool_calls"):
            raise PromptError(f"{where} must have content")
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        checked["content"] = "\n".join(_part_text(part, where) for part in content)
    elif not isinstance(content, str):
        raise PromptError(f"{where}.content must be text, got {type(content).__name__}")
    return checked


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(f"{where}.content has a part of type {kind!r}; only text parts are supported")


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's words for training: transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, without powers that would compute for hours where no interrupt reaches."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an intercepted operator."""
        whole = isinstance(left, int) and isinstance(right, int)
        if whole and right > 0 and left.bit_length() * right > _LARGEST_POWER_BITS:
            raise OverflowError(f"{shown(left)} ** {shown(right)} is too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)
