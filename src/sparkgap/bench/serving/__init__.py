"""Load on any server with OpenAI's interface, and what it answers with."""
