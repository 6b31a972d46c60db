"""Settings of all test suites."""

import functools
import logging
from collections.abc import Iterator

import botocore.session
import pytest
from hypothesis import settings

# Assertions in what test modules share are explained as those of test modules are.
pytest.register_assert_rewrite("tests.support", "integration_tests.support")

# Real servers and one Spark session; each starts when the first test asks for it.
pytest_plugins = ["sparkonce.testing.plugin"]

# No test depends on the time it takes. A failing example is printed so that it can be replayed.
settings.register_profile("sparkonce", deadline=None, print_blob=True)
settings.load_profile("sparkonce")

# Each session of boto3 parses botocore's description of S3, which takes 0.1 s. The tests make
# thousands of sessions, and share what was parsed.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """The command `sparkonce` changes how its process logs, and some tests run it in theirs."""
    logger = logging.getLogger("sparkonce")
    before = logger.level, logger.propagate, [*logger.handlers]
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.setLevel(logger.level)  # which forgets what was cached
