# verl's FSDP engine on CPUs. verl itself without its requirements: pip would also install what trackers and Ray's dashboard need.
pip install torch==2.13.0 triton==3.7.1 nvidia-ml-py==13.615.71 transformers==5.10.4 accelerate==1.15.0 peft==0.21.2 \
	tensordict==0.10.0 ray==2.60.0 hydra-core==1.3.8 codetiming==1.4.0 dill==0.4.1 pandas==3.1.1 numpy==2.4.6 \
	datasets==5.2.0 torchdata==0.11.0 pillow==13.0.0 fastapi==0.165.0 uvicorn==0.54.0
pip install --no-deps verl==0.9.1
