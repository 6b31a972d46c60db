"""Commits and aborts the uploads of a branch, proves the result, and finds open uploads."""
