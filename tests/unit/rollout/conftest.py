"""Tests that leave a file open fail."""

from tests.open_files import no_file_stays_open  # noqa: F401
