"""`python -m autofa` is the command `autofa`."""

from autofa.cli import main

if __name__ == "__main__":
    main()
