"""Settings of all test suites."""

from hypothesis import settings

# Real servers and one Spark session; each starts when the first test asks for it.
pytest_plugins = ["sparkonce.testing.plugin"]

# No test depends on the time it takes. A failing example is printed so that it can be replayed.
settings.register_profile("sparkonce", deadline=None, print_blob=True)
settings.load_profile("sparkonce")
