"""The exactness contract: its cases, and the command that measures the table in the docs."""
