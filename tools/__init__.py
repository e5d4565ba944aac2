"""Tools of the project: they are not part of the package."""
