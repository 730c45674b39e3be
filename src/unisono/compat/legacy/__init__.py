"""Run old programs unchanged: `import unisono.compat.legacy` as a program's first line.

`unisono run --legacy` does it for every process of a run. Names that Keras 3 and TensorFlow 2 have
removed work again, in this process alone; each is announced once, with the line that used it and
what to write instead. Frameworks are patched when they are imported, and none is imported here.
"""

from unisono.compat.legacy.names import find_old_modules, patch_when_imported

find_old_modules()
patch_when_imported()
