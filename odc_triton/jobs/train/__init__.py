"""Training jobs on the engine, and the data that they read."""
