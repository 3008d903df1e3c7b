"""For all tests: hypothesis has no deadline, for the machine's load is not what a test is about."""

from hypothesis import settings

settings.register_profile("rljax", deadline=None)
settings.load_profile("rljax")
