"""Sparkgap: LLM inference with DSpark speculative decoding and captured graphs."""

__version__ = "0.1.0"
