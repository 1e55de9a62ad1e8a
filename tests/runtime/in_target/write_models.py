"""Write the models that the other modules run, with this environment's transformers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from in_target import tiny_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--drafts", required=True, help="as JSON: layer ids by name")
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    tiny_models.write_target(given.folder / "target")
    tiny_models.write_kimi_k25(given.folder / "kimi_k25")
    for name, layer_ids in json.loads(given.drafts).items():
        ids = tuple(map(int, layer_ids.split(",")))
        tiny_models.write_draft(given.folder / name, ids, nested=name == "nested")
    given.report.write_text("{}")


if __name__ == "__main__":
    main()
