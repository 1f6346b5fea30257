"""Imported by every process of SGLang's engine: packages that it imports on a CPU and never calls there.

torchvision's released builds need CUDA's torch; SGLang's readers of images and sound are all that takes it.
"""

from moectl.oracle.engines.vllm_0_33_0.own_code.stand_ins import StandIns

StandIns({"torchaudio", "torchvision"}, r"(?!)").install()
