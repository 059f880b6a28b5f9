"""What is built on the library: SFT and GRPO, data, transformers' and TRL's trainers, engines that sample."""
