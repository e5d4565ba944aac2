"""Scores: pure functions of what a run recorded. Nothing here needs torch."""
