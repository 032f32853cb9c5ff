"""Stage 1: what is sampled, what is dropped, and what a prompts file adds."""

import random
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from sparkgap.catalog.checkpoint import open_checkpoint
from sparkgap.errors import ConfigError
from sparkgap.models.loading import load_target
from sparkgap.train.conversations import SampledTokens, collect, file_turns, plain_encoding, read_prompts
from sparkgap.train.features import Examples, write_shard
from sparkgap.train.generation import Conversation, ConversationSampler, LaneKernels
from sparkgap.train.openers import opener
from sparkgap.train.progress import Bar, Progress
from sparkgap.train.template import turn_template


@pytest.fixture(scope="module")
def checkpoint(tiny_target):
    return open_checkpoint(str(tiny_target))


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_target(
        checkpoint.config, checkpoint.weights, kernels=LaneKernels(), dtype=torch.float32, device=torch.device("cpu")
    )


def sample(target, checkpoint, config, seed="seed", turns=None):
    with torch.inference_mode():
        sampler = ConversationSampler(
            target, turn_template(checkpoint), config, (0,), 4, plain_encoding(checkpoint.tokenizer)
        )
        return sampler.shard(seed, None if turns is None else iter(turns))


def test_conversations_follow_the_template_and_the_limits(settings, target, checkpoint):
    config = settings(conversation={"shard_conversations": 9}).conversation
    conversations = sample(target, checkpoint, config)
    template = turn_template(checkpoint)
    assert conversations
    for conversation in conversations:
        ids, start = conversation.token_ids, conversation.answer_start
        assert ids[: len(template.opening)] == template.opening
        assert ids[start - len(template.middle) : start] == template.middle
        assert 0 < start - len(template.opening) - len(template.middle) <= config.max_user_tokens
        assert len(ids) <= config.max_positions
        assert len(ids) - start >= config.min_answer_tokens
        assert not template.end_tokens.intersection(ids[start:-1])
        assert conversation.taps.shape == (len(ids) - 1, 32)
        assert conversation.top_ids.shape == conversation.top_logprobs.shape == (len(ids) - 1, 4)


def test_greedy_answers_are_the_most_probable_tokens(settings, target, checkpoint):
    for conversation in sample(target, checkpoint, settings().conversation):
        start = conversation.answer_start
        assert conversation.token_ids[start:] == conversation.top_ids[start - 1 :, 0].tolist()


def test_openers_begin_user_turns(settings, target, checkpoint):
    opened = settings(conversation={"shard_conversations": 9, "opener_share": 1.0}).conversation
    empty = settings(conversation={"shard_conversations": 9, "opener_share": 0.0}).conversation
    openers = {checkpoint.tokenizer.encode(opener(random.Random(n)), add_special_tokens=False)[0] for n in range(2000)}
    first = len(turn_template(checkpoint).opening)
    assert {c.token_ids[first] for c in sample(target, checkpoint, opened)} <= openers
    assert not {c.token_ids[first] for c in sample(target, checkpoint, empty)} <= openers


def test_openers_are_many_and_repeatable():
    texts = {opener(random.Random(n)) for n in range(1000)}
    assert len(texts) > 400
    assert opener(random.Random(3)) == opener(random.Random(3))
    assert not any("{" in text or not text.strip() for text in texts)


def test_user_turns_are_different(settings, target, checkpoint):
    config = settings(conversation={"shard_conversations": 40, "max_user_tokens": 2}).conversation
    turns = [tuple(c.token_ids[: c.answer_start]) for c in sample(target, checkpoint, config)]
    assert len(set(turns)) == len(turns)


def test_the_same_turn_in_two_shards_is_taken_once(tmp_path):
    def conversation(user: int, answer: int) -> Conversation:
        ids = [1, user, 2, answer, answer]
        return Conversation(ids, 3, 0.0, torch.full((4, 2), float(answer)), torch.zeros(4, 1), torch.zeros(4, 1))

    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_shard(first, [conversation(5, 8), conversation(6, 9)])
    write_shard(second, [conversation(6, 10), conversation(7, 11)])
    examples = Examples([first, second])
    assert [e.token_ids[-1].item() for e in examples.items] == [8, 9, 11]
    assert [examples.taps(e)[0, 0].item() for e in examples.items] == [8, 9, 11]
    assert examples.answer_tokens == 6


def test_a_seed_gives_the_same_conversations(settings, target, checkpoint):
    config = settings(conversation={"answer_temperatures": (0.0, 0.8)}).conversation
    first, again, other = (sample(target, checkpoint, config, seed) for seed in ("a", "a", "b"))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert [c.token_ids for c in first] != [c.token_ids for c in other]


def test_given_turns_are_answered(settings, target, checkpoint):
    config = replace(settings().conversation, answer_temperatures=(0.0,))
    turns = [[65, 66, 67], [70], [71, 72]]
    conversations = sample(target, checkpoint, config, turns=turns)
    template = turn_template(checkpoint)
    found = [c.token_ids[len(template.opening) : c.answer_start - len(template.middle)] for c in conversations]
    assert sorted(found) == sorted(turns)


def test_prompt_files(tmp_path, settings, checkpoint):
    lines = tmp_path / "turns.txt"
    lines.write_text("one\n\n two \none\n")
    assert read_prompts(lines) == ["one", "two", "one"]
    objects = tmp_path / "turns.jsonl"
    objects.write_text('{"prompt": "one"}\n{"text": "two"}\n"three"\n')
    assert read_prompts(objects) == ["one", "two", "three"]
    objects.write_text('{"prompt": "a\u2028b"}\r\n"c\x85"\n', encoding="utf-8-sig")
    assert read_prompts(objects) == ["a\u2028b", "c\x85"]
    config = replace(settings().conversation, prompts=lines)
    assert len(file_turns(checkpoint.tokenizer, turn_template(checkpoint), config)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompts"),
        ("{\n", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": 3}', "line 1: no text"),
        ("7", "no text"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, content, message):
    path = tmp_path / "turns.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_a_missing_prompt_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")


def test_a_template_that_repeats_the_user_is_refused(checkpoint):
    checkpoint.tokenizer.chat_template, before = "{{ messages[0].content * 2 }}", checkpoint.tokenizer.chat_template
    with pytest.raises(ConfigError, match="writes the user's text 2 times"):
        turn_template(checkpoint)
    checkpoint.tokenizer.chat_template = before


class Shown:
    """What a bar was told."""

    def __init__(self):
        self.done = self.total = self.initial = 0

    def set(self, done):
        self.done = done

    def expect(self, total):
        self.total = total

    def start_from(self, done):
        self.initial = self.done = done


def test_the_count_foresees_whole_shards():
    shown = Shown()
    counts = SampledTokens(1000, 4, None, shown)
    assert counts.expected() == 1000
    counts.finish(0, 300, sampled_before=True)
    assert (shown.done, shown.total, shown.initial) == (300, 300 + 3 * 300, 300)
    counts.add(1, 100)
    counts.add(2, 50)
    assert (shown.done, shown.total) == (450, 300 + 3 * 300)
    counts.finish(1, 700, sampled_before=False)
    assert (shown.done, shown.total) == (750, 700 + 333)
    counts.finish(2, 1100, sampled_before=False)
    assert (shown.done, shown.total, shown.initial) == (1100, 1100, 300)


def test_the_count_ends_with_the_given_turns():
    shown = Shown()
    counts = SampledTokens(100_000, 4, 2, shown)
    counts.finish(0, 300, sampled_before=False)
    assert (shown.done, shown.total) == (300, 600)
    counts.finish(1, 500, sampled_before=False)
    assert (shown.done, shown.total) == (500, 500)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_count_ends_at_what_there_is(settings, target, checkpoint, tmp_path, monkeypatch, workers):
    config = settings(conversation={"answer_tokens": 30, "shard_conversations": 6}).conversation
    progress = Progress(Console(quiet=True))
    shown = []
    set_ = Bar.set

    def recorded(self, done, note=""):
        set_(self, done, note)
        shown.append((done, self.total, self._initial))

    monkeypatch.setattr(Bar, "set", recorded)
    arguments = (target, workers, turn_template(checkpoint), checkpoint.tokenizer, config, (0,), 4, 0, progress)
    paths = collect(tmp_path, *arguments)
    tokens = Examples(paths).answer_tokens
    assert tokens > config.answer_tokens
    assert shown[-1] == (tokens, tokens, 0)
    assert all(done <= total for done, total, _ in shown)
    shown.clear()
    assert collect(tmp_path, *arguments) == paths
    assert shown[-1] == (tokens, tokens, tokens)
