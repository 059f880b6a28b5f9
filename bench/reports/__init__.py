"""One program for each figure or table in the documentation."""
