"""Programs that compare many settings in one run: GPUs, links, lengths, numbers of ranks."""
