"""Runs the `rljax` command as `python -m rljax COMMAND ...`, where scripts are not on PATH."""

from rljax.experiments.cli import main

if __name__ == "__main__":
    main()
