"""The model: its description, its files, its forward pass over paged KV, and the sampler."""
