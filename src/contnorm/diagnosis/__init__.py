"""The cross-task normalization effect of a model: measurement, result, figure and comparison of two models."""
