"""Keras' TensorFlow backend: replicas of one process under tf.distribute, or one per process."""
