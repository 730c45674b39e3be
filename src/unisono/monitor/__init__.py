"""Views of devices and runs, from event files and the system; also of runs that crashed."""
