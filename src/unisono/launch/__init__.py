"""Starts the processes of a run, connects and ends them. No framework is imported here."""
