"""Modules for every norm. They hold parameters and buffers, and call `contnorm.functional`."""
