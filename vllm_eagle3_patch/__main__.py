"""``python -m vllm_eagle3_patch``, and the console script."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the program; an interruption while its modules are imported shows no traceback."""
    try:
        from vllm_eagle3_patch.cli.program import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("interrupted; no file was left half-changed\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
