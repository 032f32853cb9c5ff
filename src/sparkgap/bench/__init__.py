"""Measurements over a loaded model: exactness, acceptance, latency."""
