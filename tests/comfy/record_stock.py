"""Rewrite stock_nodes.json from a running ComfyUI: `python tests/comfy/record_stock.py http://127.0.0.1:8188`."""

import json
import sys
import urllib.request
from pathlib import Path

from schemas import RECORDED, plain  # beside this file

PROMPTS = Path(__file__).resolve().parents[2] / "workflows" / "api"


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/object_info") as response:
        info = json.load(response)
    prompts = [json.loads(path.read_text("utf-8")) for path in PROMPTS.glob("*.json")]
    used = {node["class_type"] for prompt in prompts for node in prompt.values()}
    stock = {name: plain(info[name]) for name in sorted(used) if not name.startswith("FastH3")}
    RECORDED.write_text(json.dumps(stock, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
