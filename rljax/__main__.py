"""`python -m rljax COMMAND ...`: the command `rljax`, for an interpreter whose scripts are not on
PATH.
"""

from rljax.experiments.cli import main

if __name__ == "__main__":
    main()
