"""Slurm: batch scripts, its commands, submitted jobs, and the resources of a task."""
