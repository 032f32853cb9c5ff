"""Sixteen clients for thousands of requests: nothing is lost, nothing is kept, and nobody's answer changes."""

import asyncio
import json
import random
import signal
from collections import Counter
from dataclasses import dataclass

import httpx
import psutil
import pytest

from sparkgap import LLM, SamplingParams
from sparkgap.rounds.speculative import TOO_MANY_TO_DRAFT

from ..speculating_model import write_looping_pair
from .running import ENGINE, Process, events, wait_until

CLIENTS = 16
ROUNDS = 10
KINDS = {"whole": 115, "stream": 115, "leave": 64, "invalid": 26}
"""Requests of a round; every round has the same ones, in another order. A fifth of the clients leave in the middle."""

CONTEXT = 2048
REFERENCE = {"prompt": "ab", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
RESIDENT_GROWTH_BYTES = 8 << 20
"""Most that the server's memory may grow by, from its second round to its last."""

SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 1, "n": 3},
    {"temperature": 0.6, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "stop": ["e", "zz"]},
    {"temperature": 0, "speculation": False},
    {"temperature": 0.8, "logit_bias": {"65": -50, "70": 3}},
)
INVALID = (
    {"temperature": -1},
    {"prompt": []},
    {"prompt": [1] * (CONTEXT + 1)},
    {"max_tokens": 0},
    {"tools": []},
    {"model": "another"},
    {"stop": ["x"] * 99},
    {"logit_bias": {"99999": 1}},
    {"unknown": True},
)


@dataclass(frozen=True)
class Plan:
    """One request, and what its client does with the answer."""

    path: str
    body: dict
    kind: str  # whole, stream, leave (in the middle), invalid
    pieces: int = 0


def make_plans() -> list[Plan]:
    chance = random.Random(11)
    plans = []
    for number, kind in enumerate(kind for kind, count in KINDS.items() for _ in range(count)):
        length = chance.choice([3, 12, 40, 90, 200, 700, 1500])
        text = "".join(chance.choice("abcdefgh ,.") for _ in range(length))
        body = {"seed": number, "max_tokens": chance.choice([1, 8, 30, 80, 150])} | chance.choice(SAMPLINGS)
        if chance.random() < 0.3:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
            logprobs = {"logprobs": True, "top_logprobs": 2}
        else:
            path, body["prompt"] = "/v1/completions", text
            logprobs = {"logprobs": 2, "echo": chance.random() < 0.5}
        if chance.random() < 0.15:
            body |= logprobs
        if kind == "invalid":
            path, body = "/v1/completions", {"prompt": "x"} | chance.choice(INVALID)
        elif kind == "leave":
            body |= {"max_tokens": 200, "ignore_eos": True}
            body.pop("stop", None)
        plans.append(Plan(path, body | {"stream": kind in ("stream", "leave")}, kind, chance.randrange(4)))
    return plans


class Clients:
    """Sixteen clients of one server, and what they were answered."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[int, list[str]] = {}
        self.outcomes: Counter[str] = Counter()
        self.references: set[str] = set()

    async def play(self, plans: list[tuple[int, Plan]]) -> None:
        """Send all requests, sixteen at a time."""
        left = iter(plans)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, verify=False) as client:

            async def work() -> None:
                for number, plan in left:
                    await self._send(client, number, plan)
                    if number % 20 == 0:
                        await self.refer(client)

            await asyncio.gather(*(work() for _ in range(CLIENTS)))

    async def refer(self, client: httpx.AsyncClient) -> None:
        """The reference request, alone or beside others."""
        answer = await client.post("/v1/completions", json=REFERENCE)
        assert answer.status_code == 200, answer.text
        self.references.add(json.dumps(answer.json()["choices"]))

    async def _send(self, client: httpx.AsyncClient, number: int, plan: Plan) -> None:
        if plan.kind == "leave":
            async with client.stream("POST", plan.path, json=plan.body) as answer:
                assert answer.status_code == 200
                lines = answer.aiter_lines()
                for _ in range(2 * plan.pieces):
                    if await anext(lines, None) is None:
                        break
                await lines.aclose()
            self.outcomes["left"] += 1
            return
        answer = await client.post(plan.path, json=plan.body)
        if plan.kind == "invalid":
            assert answer.status_code in (400, 404), answer.text
            self.outcomes["refused"] += 1
            return
        assert answer.status_code == 200, answer.text
        said = _said(answer.text) if plan.kind == "stream" else json.dumps(answer.json()["choices"])
        first = self.answers.setdefault(number, said)
        assert said == first, f"request {number} was answered otherwise before: {plan}"
        self.outcomes["answered"] += 1


def _said(text: str) -> str:
    """What a stream's choices add up to; how it was cut into pieces is a matter of time."""
    texts: Counter[int] = Counter()
    told: dict[int, list] = {}
    for event in events(text):
        assert "error" not in event, event
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            whole = told.setdefault(choice["index"], ["", None, []])
            whole[0] += piece
            whole[1] = choice["finish_reason"] or whole[1]
            if choice["logprobs"]:
                whole[2] += choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
            texts[choice["index"]] += len(piece)
    assert all(whole[1] for whole in told.values())
    return json.dumps(told, sort_keys=True)


@dataclass(frozen=True)
class Reading:
    """The server between two rounds."""

    metrics: dict[str, float]
    resident_bytes: int

    @classmethod
    def of(cls, server: Process) -> "Reading":
        def read() -> dict[str, float]:
            lines = httpx.get(server.url + "/metrics").text.splitlines()
            rows = (line.removeprefix("sparkgap:").rsplit(" ", 1) for line in lines if not line.startswith("#"))
            return {name: float(value) for name, value in rows}

        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(read()[name] for name in held), 60)
        return cls(read(), psutil.Process(server.child.pid).memory_info().rss)

    def acceptance_since(self, before: "Reading") -> float:
        """Share of draft tokens accepted."""
        names = ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")
        accepted, drafted = (self.metrics[name] - before.metrics[name] for name in names)
        return accepted / drafted


@pytest.mark.slow
def test_thousands_of_requests(tmp_path):
    model, drafter = write_looping_pair(tmp_path, max_position_embeddings=CONTEXT)
    expected = LLM(str(model), **ENGINE).generate(
        [REFERENCE["prompt"]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    )[0]
    options = {"model": model, "draft": drafter, "served-model-name": "tiny", "device": "cpu", "dtype": "float32"}
    # So little KV memory that long prompts push others out.
    options |= {"threads": 1, "max-num-seqs": 8, "kv-cache-memory": "1600K"}
    options["speculative-config"] = '{"disable_by_batch_size": 6}'
    server = Process(*(word for name, value in options.items() for word in (f"--{name}", value)))
    try:
        _soak(server, expected.outputs[0].text)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert not [line for line in server.lines if "Traceback" in line or " error " in line], server.lines
    finally:
        server.kill()


def _soak(server: Process, expected_text: str) -> None:
    plans = list(enumerate(make_plans()))
    chance = random.Random(3)
    clients = Clients(server.url)
    readings = [Reading.of(server)]

    async def refer_alone() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=600, verify=False) as client:
            await clients.refer(client)

    asyncio.run(refer_alone())
    for number in range(ROUNDS):
        chance.shuffle(plans)
        asyncio.run(clients.play(plans))
        readings.append(Reading.of(server))
        print(
            f"round {number + 1}: {readings[-1].resident_bytes / 2**20:.1f} MiB, acceptance "
            f"{readings[-1].acceptance_since(readings[-2]):.4f}, {dict(clients.outcomes)}",
            flush=True,
        )
    asyncio.run(refer_alone())
    (reference,) = clients.references
    assert json.loads(reference)[0]["text"] == expected_text
    last = readings[-1].metrics
    answered = KINDS["whole"] + KINDS["stream"]
    assert clients.outcomes == {
        "answered": ROUNDS * answered,
        "left": ROUNDS * KINDS["leave"],
        "refused": ROUNDS * KINDS["invalid"],
    }
    assert last["num_preemptions_total"] > 0
    assert last["prefix_cache_hits_total"] > 0
    assert last['graph_captures_total{when="since_startup"}'] == 0
    assert last["request_failure_total"] == 0
    assert last[f'spec_decode_num_plain_rounds_total{{reason="{TOO_MANY_TO_DRAFT}"}}'] > 0
    assert last["healthy"] == 1
    first_tenth = readings[1].acceptance_since(readings[0])
    assert abs(readings[-1].acceptance_since(readings[-2]) / first_tenth - 1) < 0.1
    assert readings[-1].resident_bytes - readings[2].resident_bytes < RESIDENT_GROWTH_BYTES
