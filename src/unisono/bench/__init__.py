"""Measurements of unisono against plain Keras: what the tables in docs/ are made of."""
