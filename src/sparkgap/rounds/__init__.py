"""One decoding round: its state, its modes, its sampling."""
