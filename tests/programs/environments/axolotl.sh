# axolotl with the packages that it pins, without kernels for GPUs, clouds' file systems, evaluation and its web page.
pip install torch==2.13.0 transformers==5.16.1 accelerate==1.13.0 peft==0.20.0 trl==1.9.0 datasets==4.8.4 \
	huggingface_hub==1.17.0 tokenizers==0.23.1 packaging==26.0 pydantic==2.12.5 PyYAML==6.0.3 typer==0.25.1 \
	typing-extensions==4.15.0 hf_xet==1.4.3 kernels==0.16.2 evaluate==0.4.1 numba==0.68.1 bitsandbytes==0.50.2 \
	posthog==6.7.11 wandb==0.21.0 addict==2.4.0 colorama==0.4.6 fastcore==2.2.41 fire==0.7.1 termcolor==3.3.0 \
	pillow==13.0.0 triton==3.7.1 nvidia-ml-py==12.560.30
pip install --no-deps axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
