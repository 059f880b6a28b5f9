# lm-eval and llama.cpp. llama-cpp-python's source has llama.cpp's own, with the script that converts; nothing of it is built.
# xllamacpp is llama.cpp, built. gguf reads the tokenizers that llama.cpp's tests have.
pip install --constraint constraints.txt torch triton transformers nvidia-ml-py==13.615.71 "lm-eval[hf]==0.4.13" \
	sentencepiece==0.2.3 gguf==0.19.0 xllamacpp==2026.10.11549 setuptools==84.2.1
folder="$(python -c 'import sys; print(sys.prefix)')"
pip download --no-deps --no-binary llama-cpp-python --dest "$folder" llama-cpp-python==0.3.36
tar --extract --gzip --file "$folder/llama_cpp_python-0.3.36.tar.gz" --directory "$folder" --strip-components 2 llama_cpp_python-0.3.36/vendor/llama.cpp
rm "$folder/llama_cpp_python-0.3.36.tar.gz"
