"""The norms: one module for each, with its function and its layers for 1d, 2d and 3d input."""
