"""The command line, one file a command. Importing it imports no torch, so that `--help` answers at once."""

from sparkgap.cli.interrupts import ending_at_once

with ending_at_once():
    from sparkgap.cli.app import app, main

__all__ = ["app", "main"]
