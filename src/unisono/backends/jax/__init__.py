"""Keras' JAX backend: one mesh over the devices of one process or many."""
