"""Log-probabilities that are no JSON numbers."""

import json
import math

from sparkgap.engine.outputs import CompletionOutput, Logprob
from sparkgap.server.logprobs import LEAST_LOGPROB, TextLogprobs, chat_logprobs

CHOSEN, IMPOSSIBLE = Logprob(-math.inf, 3, "a"), Logprob(-math.inf, 2, "b")
OUTPUT = CompletionOutput(0, "a", [65], [{65: CHOSEN, 66: IMPOSSIBLE, 67: Logprob(0.0, 1, "c")}], -math.inf, None, None)


def test_an_impossible_token_in_a_chat():
    report = chat_logprobs(OUTPUT, 2, None)
    json.dumps(report, allow_nan=False)
    (entry,) = report["content"]
    assert entry["logprob"] == LEAST_LOGPROB
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, LEAST_LOGPROB]


def test_an_impossible_token_in_a_text():
    found = TextLogprobs(2)
    found.add_output(OUTPUT)
    report = found.report()
    json.dumps(report, allow_nan=False)
    assert report["token_logprobs"] == [LEAST_LOGPROB]
    assert report["top_logprobs"] == [{"a": LEAST_LOGPROB, "b": LEAST_LOGPROB, "c": 0.0}]
