"""`python -m sparkgap`: the command line."""

from sparkgap.cli import main

if __name__ == "__main__":
    main()
