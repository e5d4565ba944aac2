"""The norms: functions, and layers for 1d, 2d and 3d input, by family of norms."""
