"""Views on what devices and runs tell: it reads, and works on runs that have crashed too."""
