"""Makes quantized model directories."""
