"""`sparkgap chat` with messages from a pipe, and what a conversation keeps."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.cli.conversation import Conversation
from sparkgap.errors import PromptError


def contents(request: list[dict[str, str]]) -> list[str]:
    """`role: content` of each message."""
    return [f"{message['role']}: {message['content']}" for message in request]


def test_each_answer_is_part_of_the_next_request(sparkgap: Callable[..., Any], llm: Any) -> None:
    result = sparkgap("chat", "--system", "be kind", stdin=b"first\n\nsecond\n/bye\nnever asked\n")
    assert (result.status, result.out) == (0, "one two three\none two three\n")
    assert [contents(request) for request in llm.requests] == [
        ["system: be kind", "user: first"],
        ["system: be kind", "user: first", "assistant: one two three", "user: second"],
    ]


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_words_that_leave(sparkgap: Callable[..., Any], llm: Any, leave: str) -> None:
    result = sparkgap("chat", stdin=f"{leave}\nnever asked\n".encode())
    assert (result.status, result.out, llm.requests) == (0, "", [])


def test_commands(sparkgap: Callable[..., Any], llm: Any) -> None:
    lines = "/help,first,/clear,/system be short,second,/system -,/clear,third,/usr/bin is what?,/exit"
    result = sparkgap("chat", stdin=lines.replace(",", "\n").encode())
    assert result.status == 0
    assert "/system TEXT" in result.err
    assert [contents(request) for request in llm.requests] == [
        ["user: first"],
        ["system: be short", "user: second"],
        ["user: third"],
        ["user: third", "assistant: one two three", "user: /usr/bin is what?"],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"/nonsense\n", "unknown command /nonsense"),
        (b"caf\xe9\n", "line 1 of standard input is not valid UTF-8"),
        (b"forbidden\n", "the chat template failed"),
        (b"word " * 64, "the context holds 64"),
    ],
)
def test_bad_messages_end_a_piped_chat(sparkgap: Callable[..., Any], llm: Any, line: bytes, message: str) -> None:
    result = sparkgap("chat", stdin=line)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_a_model_without_a_chat_template(sparkgap: Callable[..., Any], llm: Any) -> None:
    llm.tokenizer.chat_template = None
    result = sparkgap("chat", stdin=b"hi\n")
    assert result.status == 2
    assert "generate --raw" in result.err


def test_ctrl_c_stops_the_answer_and_keeps_its_beginning(sparkgap: Callable[..., Any], llm: Any) -> None:
    def interrupt_first_answer(index: int) -> None:
        if index == 1 and not llm.requests and not llm.streams_closed:
            os.kill(os.getpid(), signal.SIGINT)

    llm.before_word = interrupt_first_answer
    handler = signal.getsignal(signal.SIGINT)
    result = sparkgap("chat", stdin=b"first\nsecond\n")
    assert (result.status, result.out) == (0, "one two\none two three\n")
    assert "stopped" in result.err
    assert contents(llm.requests[0]) == ["user: first", "assistant: one two", "user: second"]
    assert llm.streams_closed == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_the_program(sparkgap: Callable[..., Any], llm: Any) -> None:
    def interrupt_twice(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    llm.before_word = interrupt_twice
    assert sparkgap("chat", stdin=b"first\nsecond\n").status == 130


def test_old_exchanges_make_room_and_the_user_is_told(sparkgap: Callable[..., Any], llm: Any) -> None:
    messages = [" ".join([f"m{i}"] * 20) for i in range(4)]
    result = sparkgap("chat", stdin="\n".join(messages).encode())
    assert result.status == 0
    assert [request[0]["content"][:2] for request in llm.requests] == ["m0", "m0", "m1", "m2"]
    assert result.err.count("its 1 oldest exchange was dropped") == 2


class WordTokenizer:
    """One token a word."""

    def encode_chat(self, messages: Any) -> list[int]:
        return [0] * sum(len(message["content"].split()) for message in messages)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=6),
    system=st.integers(0, 10),
    message=st.integers(1, 70),
    max_tokens=st.integers(1, 100),
)
def test_what_fits_is_the_longest_end_of_the_conversation(
    lengths: list[tuple[int, int]], system: int, message: int, max_tokens: int
) -> None:
    limit, room = 64, min(max_tokens, 16)
    conversation = Conversation("s " * system if system else None)
    for user, answer in lengths:
        conversation.add("u " * user, "a " * answer)
    before = list(conversation.exchanges)
    costs = [system + message + sum(u + a for u, a in lengths[skip:]) for skip in range(len(lengths) + 1)]
    if costs[-1] >= limit:
        with pytest.raises(PromptError):
            conversation.fit("w " * message, WordTokenizer(), limit, max_tokens)
        assert conversation.exchanges == before
        return
    expected = next((skip for skip, cost in enumerate(costs) if cost + room <= limit), len(lengths))
    messages, dropped = conversation.fit("w " * message, WordTokenizer(), limit, max_tokens)
    assert dropped == expected
    assert conversation.exchanges == before[expected:]
    assert len(WordTokenizer().encode_chat(messages)) == costs[expected]
    assert messages[-1] == {"role": "user", "content": "w " * message}
