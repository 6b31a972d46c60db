"""The target table: what it is, which rows it takes, and whether it still is what it was."""
