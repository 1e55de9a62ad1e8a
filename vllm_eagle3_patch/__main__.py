"""``python -m vllm_eagle3_patch``."""

from vllm_eagle3_patch.cli.program import main

if __name__ == "__main__":
    main()
