"""Requests that join, leave and are aborted in the middle of each other's rounds."""

import random
from collections.abc import Callable, Mapping, Sequence

from sparkgap import LLM, SamplingParams


def run_joining(
    llm: LLM,
    prompts: Sequence[str | list[int]],
    expected: Mapping[tuple[int, SamplingParams], Sequence[int]],
    *,
    turns: int,
    draw: random.Random,
    before_turn: Callable[[int], None] = lambda turn: None,
) -> int:
    """Steps of an engine with up to six requests, drawn from those that `expected` has tokens of, by prompt's number.

    Each output is compared; how many requests ended by themselves.
    """
    engine, running, ended = llm._engine, {}, 0
    keys = sorted(expected, key=repr)
    for turn in range(turns):
        if len(running) < 6 and draw.random() < 0.2:
            key = draw.choice(keys)
            running[engine.add_request(prompts[key[0]], key[1], output_kind="final")] = key
        if running and draw.random() < 0.01:
            name = draw.choice(list(running))
            key, output = running.pop(name), engine.abort(name)
            assert output is not None
            given = output.outputs[0].token_ids
            assert given == expected[key][: len(given)]
        before_turn(turn)
        for output in engine.step():
            given, key = output.outputs[0].token_ids, running[output.request_id]
            assert given == expected[key][: len(given)]
            if output.finished:
                assert len(given) == len(expected[running.pop(output.request_id)])
                ended += 1
    return ended
