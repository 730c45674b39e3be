"""Keras' PyTorch backend: one process per replica."""
