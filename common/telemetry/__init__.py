"""Traces and metrics: names, set-up, context across processes. Spans never hold prompts or tokens."""
