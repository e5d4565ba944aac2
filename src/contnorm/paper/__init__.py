"""The paper as data: recipes of runs for its tables and figures, and its published numbers."""
