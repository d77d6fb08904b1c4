"""Which worker holds which block: a hint for placement, never authority.

Wrong or missing entries cost time, never an answer.
"""
