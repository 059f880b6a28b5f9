"""One program for each figure or table that the documentation shows."""
