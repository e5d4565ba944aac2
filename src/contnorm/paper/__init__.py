"""The paper as data: its tables and figures as recipes of runs, and the numbers it prints."""
