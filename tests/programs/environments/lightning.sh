pip install --constraint constraints.txt torch triton transformers nvidia-ml-py==13.615.71 lightning==2.6.6 "ray[train]==2.60.0"
