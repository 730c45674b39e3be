"""`unisono migrate`: rewrites old programs and notebooks to Keras 3 and unisono.

The same table as behind `unisono.compat.legacy`, as changes of source. Comments and formatting stay
(LibCST); what needs a person gets a comment, and running it again changes nothing.
"""
