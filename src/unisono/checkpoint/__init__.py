"""Files of a model: written whole or not at all, and by one process of a run."""
