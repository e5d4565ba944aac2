"""Launchers: where the runs of an experiment are executed, on this machine or on many."""
