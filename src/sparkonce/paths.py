"""Paths on this machine, as users give them."""

from __future__ import annotations

import os
from pathlib import Path

from sparkonce.errors import ConfigurationError


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ~ or ~user at its beginning as that one's home.

    Raises:
        ConfigurationError: this machine does not know the user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"{path}: this machine knows no home of {Path(path).parts[0]}: give the whole path"
        ) from error
