"""The parts of a GRPO job: rewards, the engines that sample completions, the correction of what they sampled."""
