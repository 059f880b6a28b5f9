"""What only a GPU can tell, in stages of programs and pytest files. For the first half hour, one command after another:

    python -m bench.suites.gpu premises split-early kernels        what is assumed of the machine; one case of waits
                                                                   that could hang it; every kernel against torch
    python -m bench.suites.gpu engine rows train                   the engine; one row of a step for plain torch, FSDP2,
                                                                   the bridge and the engine; two small trainings
    python -m bench.suites.gpu timed profile                       kernels beside torch at its best; where a step's time
                                                                   goes

Then `more`, and with several GPUs `links` and `lengths`. A stage, or STAGE/RUN, may be named; none: the first three
lines. No command above takes ten minutes.

Every run is ended by `timeout` after its seconds. FOLDER/gpu_suite.json (by default out/gpu) is written anew whenever
something ends, also a single test or cell, so SIGKILL at any moment loses nothing; `report` prints it, without a GPU.
The same command goes on: runs that passed with this code on this GPU are kept. Exits with 0 if every named run
passed, 1 if not, 2 without a GPU. Nothing has run on a GPU yet.

--rehearse tries the suite itself on the CPU: tiny models, Triton's interpreter. It measures nothing.
"""
