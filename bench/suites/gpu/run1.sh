#!/usr/bin/env bash
# The first run on one GPU, 7 minutes, in the repository's root: run1.sh [FOLDER, by default $OUT or out/gpu] [SECONDS]
out=${1:-${OUT:-out/gpu}} most=${2:-410}
source bench/suites/gpu/env.sh
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,compute_mode --format=csv,noheader
python3 -c '
import time, torch, transformers, triton
start_s = time.time()
torch.ones(1, device="cuda")
print(torch.__version__, triton.__version__, transformers.__version__, f"{time.time() - start_s:.1f} s to start CUDA")'
echo "== $SECONDS s: imports"
first 120 rates right "group 4096+8x512"
# One process or two: reading and adding to each other, split samples, a kill in a wait, ten steps, no host that waits.
E=tests/gpu/test_cuda_engine.py H=tests/gpu/test_cuda_heap.py S=tests/gpu/test_cuda_split.py T=tests/gpu/test_cuda_steady.py
tests 95 10 \
    "$H::test_ranks_read_each_other[2]" "$H::test_additions_are_exact[spread-2-False]" \
    "$H::test_additions_are_exact[spread-2-True]" \
    "$S::test_as_whole_samples[spread-Qwen2-zigzag]" "$S::test_as_whole_samples[spread-Mistral-zigzag]" \
    "$S::test_the_host_never_waits_in_a_microbatch" "$S::test_a_rank_killed_while_a_device_waits_for_it[publish-0]" \
    "$S::test_bf16_is_as_good_as_on_whole_samples" "$S::test_the_queries_are_the_last_of_their_keys[31-200-48]" \
    "$E::test_ten_steps_of_qwen2[spread-1]" "$E::test_ten_steps_of_qwen2[spread-2]" \
    "$E::test_replaced_layers[spread-2-layers]" "$E::test_replaced_layers[spread-2-direct]" \
    "$E::test_replaced_layers[spread-2-staged]" "$E::test_transformed[checkpointing]" "$E::test_transformed[head]" \
    "$E::test_bf16_and_memory[2]" "$E::test_exact_sums[2]" \
    "$T::test_no_host_waits[Qwen2-roles0-none-auto]" "$T::test_no_host_waits[Llama-roles4-checkpointing-auto]" \
    "$T::test_microbatches_on_streams_of_their_own[2]" "$T::test_launched_without_a_process_group[False]" \
    "tests/gpu/test_cuda_copies.py::test_a_batch[2]" "tests/gpu/test_killed.py::test_killed[forward-0]" \
    tests/gpu/test_cuda_tree.py
first "$(left)" rows "pair 3072+2x512" head attention kernels "group 1024+8x1024" long
report
