"""The target table: its columns, the rows that it takes, and whether it has changed since."""
