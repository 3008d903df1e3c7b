"""Packages of other people: their own tests run where the packages are installed
(test_engine_package.py).
"""

collect_ignore_glob = ["rljax_*"]
