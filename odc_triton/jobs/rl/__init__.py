"""The parts of a GRPO job: rewards, engines that sample completions, and the importance correction."""
