"""Confidence intervals and paired comparisons. Needs no torch."""
