"""Drafter training: self-generated conversations, cached target features, losses and the training loop."""
