"""Load the files of a folder where there is no unisono, train on, and print what comes out."""

import json
import sys
from pathlib import Path

sys.modules["unisono"] = None

import keras
import own_classes
from twins_data import fit, rows

folder = Path(sys.argv[1])
x, y = rows()
results = {}
for path in sorted(folder.glob("*.keras")):
    is_named = path.stem.startswith("shift")
    custom = {"Shift": own_classes.Shift} if is_named else None
    model = keras.models.load_model(path, custom_objects=custom)
    targets = {"left": y, "right": -y} if path.stem == "mixed" else y
    fit(model, x, targets)
    results[path.stem] = [keras.ops.convert_to_numpy(w).tolist() for w in model.weights]
model = keras.models.model_from_json((folder / "net.json").read_text())
model.load_weights(folder / "net.weights.h5")
results["json"] = [keras.ops.convert_to_numpy(w).tolist() for w in model.weights]
assert sys.modules["unisono"] is None
print(json.dumps(results))
