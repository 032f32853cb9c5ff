"""`python -m sparkgap`: the command line."""

from sparkgap.cli import main

main()
