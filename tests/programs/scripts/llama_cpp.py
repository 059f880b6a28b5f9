"""Prints what llama.cpp continues a prompt with, and how probable it is, as JSON: llama_cpp.py FILE PROMPT."""

import json
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = sys.argv[1], 256, 1, False
# By default K and V are in fp16, and flash attention computes in it: log-probabilities then differ by up to 0.002.
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
asked = {"prompt": sys.argv[2], "n_predict": 6, "temperature": 0, "n_probs": 1}
said = xllamacpp.Server(params).handle_completions(asked)["choices"][0]["logprobs"]["content"]
print(json.dumps({"ids": [token["id"] for token in said], "log_probs": [token["logprob"] for token in said]}))
