"""Makes a parallel model, and has it saved; says so, and waits to be killed.

python left_behind.py FOLDER
"""

import sys
import time

import keras

import unisono

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
unisono.parallel(model, replicas=2)
plain = keras.layers.Dense.save_own_variables


def save_own_variables(self, store):
    plain(self, store)
    print("here", flush=True)
    time.sleep(600)


keras.layers.Dense.save_own_variables = save_own_variables
model.save(f"{sys.argv[1]}/model.keras")
