"""Conversion of a model's normalization layers, and detection of the norms of other libraries."""
