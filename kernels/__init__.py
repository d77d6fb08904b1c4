"""The operations on tensors that the model is made of: one Protocol, three implementations.

`reference` is the slow, obvious specification; `cpu` and `triton` must agree with it. `ops.select` picks once.
"""
