"""Where a prompt comes from: an argument, a file or standard input."""

import sys
from pathlib import Path

from sparkgap.errors import PromptError


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt's text. One line break at the end of a file or of standard input is not part of it.

    Args:
        argument: the prompt itself, or `-` for standard input.
        file: a file that holds the prompt, or `-` for standard input.

    Raises:
        PromptError: no prompt or two, an unreadable file, not UTF-8, or empty.
    """
    if (argument is None) == (file is None):
        have = "no prompt" if argument is None else "two prompts"
        raise PromptError(f"{have}: give one as an argument, with --prompt-file FILE, or - to read standard input")
    if argument == "-" or file == Path("-"):
        text = _decode(_read_standard_input(), "standard input").removesuffix("\n").removesuffix("\r")
    elif file is not None:
        text = _decode(_read_file(file), f"prompt file {file}").removesuffix("\n").removesuffix("\r")
    else:
        text = argument or ""
        _check_argument(text)
    if not text:
        raise PromptError("the prompt is empty; give some text")
    return text


def _read_standard_input() -> bytes:
    if sys.stdin is None:
        raise PromptError("standard input is closed; give the prompt as an argument or with --prompt-file FILE")
    return sys.stdin.buffer.read()


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PromptError(f"cannot read prompt file {file}: {reason}; check the path") from error


def _decode(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not valid UTF-8 at byte {error.start}; convert it to UTF-8") from error


def _check_argument(text: str) -> None:
    """Python hands on bytes of the command line that are no text as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the prompt on the command line is not valid UTF-8; convert it to UTF-8") from error
