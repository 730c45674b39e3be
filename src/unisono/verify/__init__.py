"""`unisono verify`: does a program give on N replicas what it gives on one device, and if not, why.

The program runs unchanged in fresh processes, which record each optimizer step (`record`); the
records are compared (`compare`), and differences are explained by evidence (`diagnose`).
"""
