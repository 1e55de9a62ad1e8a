"""``python -m benchmarks.acceptance``."""

from benchmarks.acceptance.run import main

raise SystemExit(main())
