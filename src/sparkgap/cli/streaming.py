"""An answer on the screen while it is produced."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkgap.cli.console import write_text

if TYPE_CHECKING:
    from sparkgap.engine.outputs import RequestOutput


@dataclass
class Answer:
    """What was shown.

    Attributes:
        text: all of it.
        num_tokens: output tokens.
        last: the last piece, with the metrics; None when there was none.
        stopped: the user ended it.
    """

    text: str = ""
    num_tokens: int = 0
    last: "RequestOutput | None" = None
    stopped: bool = False


def show_stream(
    stream: Generator["RequestOutput", None, None], stop_wanted: Callable[[], bool] = lambda: False
) -> Answer:
    """Write an answer piece by piece, and a line break at its end.

    Args:
        stream: pieces of one answer, each with the text and tokens that are new in it.
        stop_wanted: asked after each piece; True ends the request.

    Raises:
        SparkgapError: the request cannot be served, or failed.
    """
    answer = Answer()
    try:
        for piece in stream:
            completion = piece.outputs[0]
            answer.text += completion.text
            answer.num_tokens += len(completion.token_ids)
            answer.last = piece
            write_text(completion.text)
            if stop_wanted():
                answer.stopped = True
                break
    finally:
        stream.close()
        if answer.last is not None:
            write_text("\n")
    return answer
