# LLaMA-Factory, without what serves models or reads images and sound. It imports torchaudio, whose package for torch 2.13 is
# for GPUs: an empty one does.
pip install torch==2.13.0 transformers==5.6.0 accelerate==1.11.0 peft==0.18.1 trl==0.24.0 datasets==4.0.0 \
	omegaconf==2.4.0 triton==3.7.1 nvidia-ml-py==13.615.71
pip install --no-deps llamafactory==0.9.5
touch "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
