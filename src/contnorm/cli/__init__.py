"""Command-line interface: each command is a thin layer over the library."""
