"""MNIST-like digits with Horovod and Keras (Horovod's example of 2018)."""
from __future__ import print_function

import random
import sys

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
from keras.layers import Dense, Flatten
from keras.models import Sequential

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

random.seed(9)
np.random.seed(9)
x_train = np.random.rand(64, 8, 8, 1).astype("float32")
y_train = keras.utils.to_categorical(np.random.randint(0, 10, 64), 10)
x_train, y_train = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

model = Sequential()
model.add(Flatten(input_shape=(8, 8, 1)))
model.add(Dense(16, activation="relu"))
model.add(Dense(10, activation="softmax"))

# Horovod: adjust learning rate based on number of GPUs.
opt = keras.optimizers.Adagrad(lr=0.05 * hvd.size())

# Horovod: add Horovod Distributed Optimizer.
opt = hvd.DistributedOptimizer(opt)

model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]

model.fit(
    x_train,
    y_train,
    batch_size=16,
    callbacks=callbacks,
    epochs=2,
    shuffle=False,
    verbose=2 if hvd.rank() == 0 else 0,
)

# Horovod: save on worker 0 only, to prevent other workers from corrupting it.
if hvd.rank() == 0:
    model.save_weights(sys.argv[1])
hvd.shutdown()
