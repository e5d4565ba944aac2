"""What records say beside published numbers and beside each other: intervals, verdicts, claims. Needs no torch."""
