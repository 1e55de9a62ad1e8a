"""What runs inside an environment with a real vLLM: started with its interpreter, by ``-m``."""
