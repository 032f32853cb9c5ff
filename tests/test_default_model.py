"""The default model against transformers, from the same GGUF file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparkgap import LLM, SamplingParams
from sparkgap.catalog.checkpoint import open_path
from sparkgap.models.cache import allocate_caches
from sparkgap.models.loading import load_target
from sparkgap.ops import TorchKernels
from sparkgap.rounds.batching import RowSpan, forward_batch
from sparkgap.rounds.sequence import Sequence

pytestmark = pytest.mark.model

PROMPTS = [
    "The capital of France is",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 * 23?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name FROM users WHERE",
    "The mitochondria is the",
    "In 1969, humans first",
    "Photosynthesis is the process by which",
    "Zürich liegt am",
    "日本の首都は",
    "To make an omelette, first",
    "    indented text\n\n\n\tand a tab",
    "The meaning of the word 'ephemeral' is",
    "a",
    "She said that the results of the experiment were " * 12,
]
GREEDY_TOKENS = 64


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(default_model_path: Path, _one_thread: None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def test_logits_of_twenty_prompts(default_model_path: Path, reference: Any) -> None:
    checkpoint = open_path("smollm2-135m", default_model_path)
    cpu = torch.device("cpu")
    target = load_target(
        checkpoint.config,
        checkpoint.weights,
        kernels=TorchKernels(),
        dtype=torch.float32,
        device=cpu,
        max_model_len=256,
    )
    config = target.config
    for prompt in PROMPTS:
        token_ids = checkpoint.tokenizer.encode(prompt)
        caches = allocate_caches(config.num_layers, config.num_kv_heads, config.head_dim, 16, 16, torch.float32, cpu)
        sequence = Sequence(0, SamplingParams(), 0, token_ids, block_table=list(range(16)))
        batch = forward_batch([RowSpan(sequence, 0, token_ids)], 16, cpu)
        ours = target.logits(target.forward(batch, caches).hidden)
        theirs = reference(torch.tensor([token_ids])).logits[0]
        assert (ours - theirs).abs().max() < 1e-3, prompt


@pytest.mark.parametrize("prompts", [PROMPTS[:3], pytest.param(PROMPTS[3:], marks=pytest.mark.slow)])
def test_greedy_tokens(default_model_path: Path, reference: Any, prompts: list[str]) -> None:
    llm = LLM(str(default_model_path), dtype="float32", max_model_len=512, threads=1)
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = torch.tensor([llm.tokenizer.encode(prompt)])
        theirs = reference.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=GREEDY_TOKENS,
            pad_token_id=2,
        )[0, token_ids.shape[1] :].tolist()
        assert output.outputs[0].token_ids == theirs, prompt
