"""How fast it is: layers, training steps and whole runs, timed against torch's own, as rows of a table."""
