"""Programs that doctor's checks run in processes of their own; each writes records to a file."""
