"""`python -m sparkonce`: the command `sparkonce`."""

from __future__ import annotations

from sparkonce.cli.main import main

if __name__ == "__main__":
    main()
