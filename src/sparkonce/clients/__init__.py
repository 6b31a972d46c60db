"""What a sink and a log share about one vendor's client."""
