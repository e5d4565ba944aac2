"""Speed benchmarks of layers, training steps and whole runs, compared with torch's own layers."""
