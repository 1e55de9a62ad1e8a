"""What is changed in vLLM: one module a patch, and in ``releases/`` what each release holds."""
