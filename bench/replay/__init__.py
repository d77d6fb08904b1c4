"""Replays a seeded trace of requests against any server with OpenAI's completions API, and reports what it saw."""
