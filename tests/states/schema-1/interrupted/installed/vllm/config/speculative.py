# vllm-eagle3-patch: a-patch
ALLOWED = ["llama"]
