"""Doctests are collected from all modules; the tool that executes tutorials can't be imported without its packages."""

from importlib.util import find_spec

collect_ignore = [] if all(map(find_spec, ("nbclient", "nbformat", "PIL"))) else ["notebooks.py"]
