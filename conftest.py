"""Settings of all test suites."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Assertions in what test modules share are explained as those of test modules are.
pytest.register_assert_rewrite("tests.support", "integration_tests.support")

# Real servers and one Spark session; each starts when the first test asks for it.
pytest_plugins = ["sparkonce.testing.plugin"]

# No test depends on the time it takes. A failing example is printed so that it can be replayed.
settings.register_profile("sparkonce", deadline=None, print_blob=True)
settings.load_profile("sparkonce")


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """The command `sparkonce` changes how its process logs, and some tests run it in theirs."""
    logger = logging.getLogger("sparkonce")
    before = logger.level, logger.propagate, [*logger.handlers]
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.setLevel(logger.level)  # which forgets what was cached
