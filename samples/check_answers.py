"""Counts the right answers in an output file of ``ouro-batch run`` on the sample tasks.

python samples/check_answers.py answers.jsonl --at-least 0.95
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from tasks import is_correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", help="output records whose metadata has task and answer")
    parser.add_argument("--at-least", type=float, default=0.0, help="share that must be right")
    args = parser.parse_args()

    asked, right = Counter(), Counter()
    with open(args.answers, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "error" in record:
                asked["error"] += 1
                continue
            metadata = record["metadata"]
            asked[metadata["task"]] += 1
            right[metadata["task"]] += is_correct(record["text"], metadata["answer"])
    for task in sorted(asked):
        print(f"{task:12} {right[task]:4} of {asked[task]:4}")
    share = right.total() / max(asked.total(), 1)
    print(f"{'all':12} {right.total():4} of {asked.total():4}  {share:.1%}")
    if share < args.at_least:
        sys.exit(f"below {args.at_least:.1%}")


if __name__ == "__main__":
    main()
