"""HTTP: an OpenAI-compatible server (needs the extra `server`)."""
