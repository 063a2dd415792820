"""Print the overhead table of the README from benchmarks/results/overhead.jsonl; ``--write`` puts it there.

The newest row of each recipe and device counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
START, END = "<!-- overhead -->", "<!-- /overhead -->"
Rows = dict[tuple[str, str], dict[str, Any]]


def newest(lines: list[str]) -> Rows:
    rows: Rows = {}
    for row in sorted(map(json.loads, lines), key=lambda row: row["when"]):
        label = " ".join(
            [row["recipe"], *(f"{key}={value}" for key, value in row["options"].items() if key not in ("dense", "switch"))]
        )
        rows[label, row["device"]] = row
    return rows


def cell(rows: Rows, label: str, device: str) -> str:
    row = rows.get((label, device))
    return "not measured" if row is None else f"{row['ratio']:.2f}" + (" *" if row.get("note") else "")


def table(rows: Rows) -> str:
    labels = list(dict.fromkeys(label for label, _ in rows))
    lines = ["| recipe, 2:4 | CPU, eager, 256 wide | H200, compiled, bf16, 1024 wide |", "|---|---|---|"]
    lines += [f"| `{label}` | {cell(rows, label, 'cpu')} | {cell(rows, label, 'cuda')} |" for label in labels if label != "dense"]
    notes = sorted({row["note"] for row in rows.values() if row.get("note")})
    return "\n".join([*lines, "", *(f"\\* {note}" for note in notes)]).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in the README")
    text = table(newest((HERE / "results" / "overhead.jsonl").read_text().splitlines()))
    if not parser.parse_args().write:
        print(text)
        return
    before, _, rest = README.read_text().partition(START)
    README.write_text(f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
