"""`unisono migrate`: rewrites old programs and notebooks for Keras 3 and unisono.

Uses the same table as `unisono.compat.legacy`. Comments and formatting stay (LibCST); what the user
has to decide gets a comment, and a second run changes nothing.
"""
