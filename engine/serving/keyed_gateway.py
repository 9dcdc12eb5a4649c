"""The gateway `smg` with its API key from the environment: it reads one from its words alone."""

from __future__ import annotations

import os
import sys

VARIABLE = "TREADLE_API_KEY"
"""Holds the key. Words of a command stand in the list of processes, which all users may read."""


def main() -> None:
    """Runs `smg` with the words of this command and the key."""
    from smg import cli

    # In one word: a key may begin with a dash.
    cli.main([*sys.argv[1:], f"--api-key={os.environ.pop(VARIABLE)}"])


if __name__ == "__main__":
    main()
