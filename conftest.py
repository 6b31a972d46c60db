"""Settings of all test suites."""

import pytest
from hypothesis import settings

# Assertions in what test modules share are explained as those of test modules are.
pytest.register_assert_rewrite("tests.support", "integration_tests.support")

# Real servers and one Spark session; each starts when the first test asks for it.
pytest_plugins = ["sparkonce.testing.plugin"]

# No test depends on the time it takes. A failing example is printed so that it can be replayed.
settings.register_profile("sparkonce", deadline=None, print_blob=True)
settings.load_profile("sparkonce")
