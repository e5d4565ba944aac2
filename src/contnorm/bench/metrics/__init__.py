"""Scores computed from the counts in a record. No module here imports torch."""
