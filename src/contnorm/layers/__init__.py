"""Modules for every norm: they own parameters and buffers, and call `contnorm.functional`."""
