"""From a model name to files, weights, tokenizer and chat template."""
