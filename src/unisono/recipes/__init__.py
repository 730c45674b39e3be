"""Complete training programs, one page each, to run, read and copy.

A page uses only what a user of the package can: Keras and unisono's public calls. Nothing in the
package imports from here.
"""
