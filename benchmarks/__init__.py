"""Measurements of speed and accuracy, run by hand in a checkout: their records are in docs/records."""
