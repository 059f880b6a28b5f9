"""The figures of these pages. `python -m docs.figures` redraws them all, and the tables next to them.

A module here is one figure. It has `data()`, which asks the library or reads what a run recorded, and `draw(data)`,
which sees nothing else and returns the SVG. Some have `table(data)`: the same numbers as Markdown, in docs/tables.
"""
