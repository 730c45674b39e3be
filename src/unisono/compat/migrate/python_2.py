"""Functions of Python 2 that a program may call where its syntax is Python 3's."""

PYTHON_2 = {
    "xrange": "range",
    "raw_input": "input",
    "unicode": "str",
    "basestring": "str",
    "long": "int",
    "unichr": "chr",
    "execfile": "exec(open(name).read())",
    "reduce": "functools.reduce",
    "reload": "importlib.reload",
}
