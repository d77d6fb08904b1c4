"""Two sides of a comparison in, one card out: what changed, what it did, and whether to adopt it."""
