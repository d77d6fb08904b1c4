"""The decode service: reserves room, receives blocks, and streams tokens by continuous batching.

It can compute prompts too: alone it is the whole server, and it recomputes what a failed transfer did not bring.
"""
