"""Everything that only a GPU can tell, in stages that can be interrupted and continued.

    python -m bench.suites.gpu [STAGE ...] [--out out/gpu] [--seconds S] [--again | --any-code]
                               [--rehearse]
    python -m bench.suites.gpu report [--out out/gpu]

The stages of the first half hour, in this order; they also run if none is named. None needs a network, and no command
takes ten minutes:

    stage          seconds
    checks             120  kernel, driver and TMPDIR; that tests may fork; one call of torch; the heap's tests
    kernels-right      480  tests/kernels natively, side by side on all cores
    engine             360  the engine's tests, by one and by two processes on one GPU
    train              180  `odc-triton train sft` on real text, by one and by two processes, to a falling loss
    kernels-timed      420  bench.kernels.run: what is most wanted first, beside torch at its best

Later ones:

    staged             150  linear and linear_dx through staged weights: right on full sizes and on ragged ones
    four               120  four processes on one GPU: exact additions, ten steps of models
    step               240  a step of a model of Qwen2.5-1.5B's shape, profiled: where its time goes
    killed              90  one of two processes killed while it trains: the other names it, nothing is left
    split              150  pieces of sequences on two and three processes: parity, bf16, a death while a device waits
    bridge              60  a model of torch's own fully_shard under use_odc, on one to three processes
    memcheck           240  compute-sanitizer over every kernel on small shapes, where that tool is present
    links              120  bench.suites.links, with two GPUs or more: gather, scatter, linear, wgrad between every two
    lengths            420  `odc-triton bench --lengths`, with two GPUs or more: FSDP2, DDP and ODC over NCCL

--seconds is for all named stages together (by default the sum of theirs): each gets its share of the time left, so time
that one does not use goes to the next.

Every outcome is appended to FOLDER/outcomes.jsonl as it comes, and every timed cell to kernels.jsonl, so SIGKILL at any
moment loses nothing. With the same folder the same command continues: tests that passed, runs that ended and cells that
were measured are kept, if code, GPU and versions are the same; after a fix, --any-code also keeps tests and runs that
passed with other code; --again runs them all. gpu_suite.json, with hardware, driver, kernel, versions and commit, and
gpu_suite.md for people are built from these lines when a stage ends, and by `report` at any time, without a GPU. There
are at most six files. Exits with 0 if every stage passed, 1 if not, 2 without a GPU. No stage has run on a GPU yet.

--rehearse runs all of this without a GPU, in a few minutes: on tiny models, in Triton's interpreter, by the host's
clock (bench/device.py). Its files say so, and don't go into bench/results. It can't rehearse what the stages are for
(kernels as machine code, symmetric memory, streams, NCCL), timing events and their cost, GPU memory, faults that end
its context, kernels that hang, how long anything takes there, nvidia-smi, compute-sanitizer, and whether a test marked
`gpu` is collected at all.
"""
