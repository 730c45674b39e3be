'''Train a small deep CNN on CIFAR10-like images on two GPUs (Keras 2.2, 2018).'''
from __future__ import print_function

import random
import sys

import numpy as np
import keras
from keras.layers.core import Activation, Dense, Flatten  # the homes of that time
from keras.layers.convolutional import Conv2D
from keras.layers import MaxPooling2D
from keras.models import Sequential
from keras.utils import multi_gpu_model, np_utils

batch_size = 16
num_classes = 10
epochs = 2
G = 2  # number of GPUs

random.seed(7)
np.random.seed(7)

# The data, shuffled and split between train and test sets.
x_train = np.random.rand(70, 8, 8, 3).astype("float32")
y_train = np_utils.to_categorical(np.random.randint(0, num_classes, 70), num_classes)
x_test, y_test = x_train[:20], y_train[:20]

model = Sequential()
model.add(Conv2D(4, (3, 3), padding="same", input_shape=x_train.shape[1:]))
model.add(Activation("relu"))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Flatten())
model.add(Dense(num_classes))
model.add(Activation("softmax"))

# initiate RMSprop optimizer
opt = keras.optimizers.rmsprop(lr=0.001, decay=1e-2)

try:
    parallel_model = multi_gpu_model(model, gpus=G)
except ValueError:
    parallel_model = model
    print("Training on one device.")

# Let's train the model using RMSprop
parallel_model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])
history = parallel_model.fit(
    x_train,
    y_train,
    batch_size=batch_size * G,
    epochs=epochs,
    validation_data=(x_test, y_test),
    shuffle=False,
    verbose=0,
)
print("accuracy", history.history["acc"][-1], "validation", history.history["val_acc"][-1])

# Save the template, which holds the weights of the parallel model.
model.save_weights(sys.argv[1])
