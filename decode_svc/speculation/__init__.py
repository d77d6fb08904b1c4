"""Speculation: guesses from a proposer, verified by equality with the target's own choice.

Never changes an answer; only how many target passes it takes.
"""
