"""The command line and all that it runs except jobs: simulator, doctor, tune, profile, memory."""
