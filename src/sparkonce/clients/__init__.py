"""Code that the sinks and the logs of one vendor share."""
