# USAGE
# python train_images.py --output plot.png --gpus 2

# set the matplotlib backend so figures can be saved in the background
import matplotlib
matplotlib.use("Agg")

# import the necessary packages
from keras.callbacks import LearningRateScheduler
from keras.layers import Activation, BatchNormalization, Conv2D, Dense, Flatten, Input
from keras.models import Model
from keras.optimizers import SGD
from keras.preprocessing.image import ImageDataGenerator
from keras.utils import to_categorical
from keras.utils.training_utils import multi_gpu_model
import argparse
import random

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

# construct the argument parse and parse the arguments
ap = argparse.ArgumentParser()
ap.add_argument("-o", "--output", required=True, help="path to output plot")
ap.add_argument("-g", "--gpus", type=int, default=1, help="# of GPUs to use for training")
ap.add_argument("-w", "--weights", required=True, help="path to output weights")
args = vars(ap.parse_args())

# grab the number of GPUs and store it in a conveience variable
G = args["gpus"]

# definine the total number of epochs to train for along with the
# initial learning rate
NUM_EPOCHS = 2
INIT_LR = 5e-3


def poly_decay(epoch):
    # initialize the maximum number of epochs, base learning rate,
    # and power of the polynomial
    return INIT_LR * (1 - (epoch / float(NUM_EPOCHS))) ** 1.0


def build():
    inputs = Input(shape=(8, 8, 3))
    x = Conv2D(4, (3, 3), padding="same")(inputs)
    x = BatchNormalization()(x)
    x = Activation("relu")(x)
    x = Flatten()(x)
    return Model(inputs, Dense(10, activation="softmax")(x))


random.seed(42)
np.random.seed(42)
trainX = np.random.rand(64, 8, 8, 3).astype("float")
trainX -= np.mean(trainX, axis=0)
trainY = to_categorical(np.random.randint(0, 10, 64), 10)

# construct the image generator for data augmentation
aug = ImageDataGenerator(
    width_shift_range=0.1, height_shift_range=0.1, horizontal_flip=True, fill_mode="nearest"
)
callbacks = [LearningRateScheduler(poly_decay)]

# check to see if we are compiling using just a single GPU
if G <= 1:
    print("[INFO] training with 1 GPU...")
    model = build()
else:
    print("[INFO] training with {} GPUs...".format(G))

    # we'll store a copy of the model on *every* GPU and then combine
    # the results from the gradient updates on the CPU
    with tf.device("/cpu:0"):
        # initialize the model
        model = build()

    # make the model parallel
    model = multi_gpu_model(model, gpus=G)

print("[INFO] compiling model...")
opt = SGD(lr=INIT_LR, momentum=0.9)
model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

# train the network
print("[INFO] training network...")
H = model.fit_generator(
    aug.flow(trainX, trainY, batch_size=8 * G),
    validation_data=(trainX[:16], trainY[:16]),
    steps_per_epoch=len(trainX) // (8 * G),
    epochs=NUM_EPOCHS,
    callbacks=callbacks, verbose=2)

# grab the history object dictionary
H = H.history

# plot the training loss and accuracy
N = np.arange(0, len(H["loss"]))
plt.style.use("ggplot")
plt.figure()
plt.plot(N, H["loss"], label="train_loss")
plt.plot(N, H["val_loss"], label="test_loss")
plt.plot(N, H["acc"], label="train_acc")
plt.plot(N, H["val_acc"], label="test_acc")
plt.legend()
plt.savefig(args["output"])
model.save_weights(args["weights"])
