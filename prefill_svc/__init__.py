"""The prefill service: computes prompts in chunks, samples the first token, pushes the blocks to decode.

Keeps nothing of a request after its hand-off, except blocks that another prompt may reuse.
"""
