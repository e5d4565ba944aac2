"""Generates the pages of docs/reference from the code, so that they are never out of date.

``python -m tools.reference`` writes all of them; tests/reference compares them with the committed ones.
"""
