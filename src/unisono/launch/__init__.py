"""Start processes, talk to them, end them. No framework is imported in this room."""
