"""Data of a model: shards of a global batch, and the sources that yield them."""
