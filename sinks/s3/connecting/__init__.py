"""Reaches the server: its settings, the clients, what is checked at a start, and `doctor`."""
