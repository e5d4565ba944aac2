"""Conversion of a model's normalization layers, and detection of norms of other libraries."""
