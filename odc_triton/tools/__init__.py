"""The command and what it runs besides jobs: simulator, doctor, tune, profile, memory."""
