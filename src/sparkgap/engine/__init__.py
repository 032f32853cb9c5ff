"""Requests: queue, continuous batching, KV blocks, stop conditions, detokenizing."""
