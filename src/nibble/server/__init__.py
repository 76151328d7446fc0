"""The server: an OpenAI-compatible interface over an engine in a process of its own."""
