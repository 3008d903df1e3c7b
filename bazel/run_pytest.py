"""What a `suite` runs: pytest on the files that it is given."""

import sys

import pytest

NOTHING_COLLECTED = 5  # all of the file is marked slow or gpu

if __name__ == "__main__":
    status = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]])
    sys.exit(0 if status == NOTHING_COLLECTED else status)
