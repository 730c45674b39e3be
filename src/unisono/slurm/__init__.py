"""Slurm: batch scripts, its commands, the jobs that were submitted, and what it gave a task."""
