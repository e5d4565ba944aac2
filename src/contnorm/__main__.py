"""``python -m contnorm``: the command line."""

from contnorm.cli.main import main

if __name__ == "__main__":
    main()
