"""The KV cache: its layout, names, accounts, tensors and frames.

Nothing here knows a request's life; schedulers own that.
"""
