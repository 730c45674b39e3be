"""The causes that `unisono verify` can name, with what to write instead."""

from dataclasses import dataclass

from unisono.verify.records import Site


@dataclass(frozen=True)
class Cause:
    """Why two runs differ."""

    key: str
    """A word for programs, as docs/verify.md lists them."""
    what: str
    """What the program does."""
    evidence: str
    """What was recorded or tried that shows it."""
    remedy: str
    """What to write instead."""
    site: Site | None = None
    is_proven: bool = True
    """Whether the evidence is of this cause alone; otherwise it is likely."""


REMEDIES = {
    "random layer": "Nothing is wrong with it: on TensorFlow and torch each replica draws for its "
    "own rows. On torch, --exact gives replicas the random numbers of one device; on TensorFlow, "
    "take the random layers out to compare the rest.",
    "random op": "Draw by keras.random with a keras.random.SeedGenerator of the model, and compare "
    "with --exact.",
    "batch norm": "Leave out sync_batch_norm=False, so that batch norm sees the global batch.",
    "torch batch norm": "A torch module keeps its own batch norm, per replica: use "
    "keras.layers.BatchNormalization, or torch.nn.GroupNorm or LayerNorm in the module.",
    "loss": "Make it a mean or a sum over the rows of the batch, or give it to compile(loss=...), "
    "where it gets the rows of all replicas.",
    "unseeded data": "Give it a seed: np.random.default_rng(0), random.Random(0); or compare with "
    "--exact, which does it for you.",
    "shuffle": "Write shuffle(..., seed=0), or give a DataLoader a generator with a seed.",
    "seed": "Use a constant seed, the same for any number of replicas.",
    "global batch": "Keep the batch size that fit is given independent of the number of replicas: "
    "it is that of the global batch. To compare at the scaled batch, use --same-batch.",
    "learning rate": "Keep the learning rate as it is: the global batch is the same on any number "
    "of replicas, and so are the gradients.",
    "arguments": "Make it independent of the number of replicas.",
    "data by process": "Give every process the same global batches in the same order: unisono "
    "takes each process' rows. Do not split or shuffle by rank, and give shuffles a seed.",
    "one rank": "Do it in every process, and let the chief only print or write files; or use "
    "unisono.callbacks.every_rank(callback).",
    "loop loss": "Divide by the rows of the global batch: unisono.compute_average_loss(losses), "
    "with a loss made with reduction=None.",
    "loop regularization": "Add unisono.scale_regularization_loss(model.losses): gradients are "
    "summed over replicas.",
    "loop gradients": "Call strategy.reduce_gradients(gradients) first: until an optimizer applies "
    "them, gradients are those of one replica's rows.",
    "loop data": "Iterate strategy.distribute_dataset(dataset), which gives each replica its rows.",
    "layer": "On TensorFlow and torch, use only operations on single rows, or Keras' batch norm, "
    "which unisono synchronizes; on JAX every layer sees the global batch.",
    "stateful": "Use stateful=False, or train it on one device: its state has one entry per row.",
    "layer state": "Compute it from the whole batch in a callback, or accept the mean over "
    "replicas: on TensorFlow and torch each replica sees its own rows.",
    "metric": "Make it a keras.metrics.Metric whose state is updated from y_true and y_pred, and "
    "keep no other state.",
    "train step": "Use only means or sums over the rows of a batch, and operations on single rows.",
}
