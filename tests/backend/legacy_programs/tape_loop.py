"""A training loop of one's own with tf.distribute (TensorFlow 2.0's tutorial, 2019)."""
import random
import sys

import numpy as np
import tensorflow as tf

random.seed(5)
np.random.seed(5)
train_images = np.random.rand(100, 12).astype("float32")
train_labels = np.random.randint(0, 4, 100)

# If the list of devices is not specified in the constructor, it will be auto-detected.
strategy = tf.distribute.MirroredStrategy()

BATCH_SIZE_PER_REPLICA = 16
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 2

train_dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
train_dataset = train_dataset.batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

with strategy.scope():
    # Set reduction to `none` so we can do the reduction afterwards.
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

    def compute_loss(labels, predictions):
        per_example_loss = loss_object(labels, predictions)
        return tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)

    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(8, activation="relu", input_shape=(12,)),
        tf.keras.layers.Dense(4),
    ])
    optimizer = tf.keras.optimizers.Adam()


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


# `experimental_run_v2` replicates the computation and runs it with the distributed input.
@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.experimental_run_v2(train_step, args=(dataset_inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    print(
        "Epoch {}, Loss: {}, Accuracy: {}".format(
            epoch + 1, total_loss / num_batches, train_accuracy.result() * 100
        )
    )
    train_accuracy.reset_states()

model.save_weights(sys.argv[1])
