"""Text of our own in several styles and languages, and the inputs that it gives to each product of a model."""
