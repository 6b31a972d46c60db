"""Turns the rows of a branch into files, and streams each file into a multipart upload."""
