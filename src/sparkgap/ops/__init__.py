"""The operations models are written in, and their implementations."""
