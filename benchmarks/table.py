"""Print the tables of the README from benchmarks/results/*.jsonl; ``--write`` puts them there.

The newest row of each recipe and device, or of each kernel, product, layer and model, counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    lines = (HERE / "results" / name).read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda row: row["when"])


# ---- what emulation costs ----


def label(row: Row) -> str:
    options = [f"{key}={value}" for key, value in row["options"].items() if key not in ("dense", "switch")]
    return " ".join([row["recipe"], *options])


def cell(rows: dict[tuple[str, str], Row], name: str, device: str) -> str:
    row = rows.get((name, device))
    return "not measured" if row is None else f"{row['ratio']:.2f}" + (" *" if row.get("note") else "")


def overhead_table() -> str:
    rows = {(label(row), row["device"]): row for row in read("overhead.jsonl")}
    names = list(dict.fromkeys(name for name, _ in rows))
    lines = ["| recipe, 2:4 | CPU, eager, 256 wide | H200, compiled, bf16, 1024 wide |", "|---|---|---|"]
    lines += [f"| `{name}` | {cell(rows, name, 'cpu')} | {cell(rows, name, 'cuda')} |" for name in names if name != "dense"]
    notes = sorted({row["note"] for row in rows.values() if row.get("note")})
    return "\n".join([*lines, "", *(f"\\* {note}" for note in notes)]).rstrip()


# ---- what sparse tensor cores gain ----


def steps_table(rows: list[Row]) -> list[str]:
    newest = {(row["suite"], row["model"], row["recipe"]): row for row in rows if row["suite"] in ("steps", "sharded")}
    lines = ["| whole training step | recipe | dense, ms | sparse, ms | **speed-up** | joules | peak memory |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (suite, model, recipe), row in newest.items():
        note = (", FSDP2" if suite == "sharded" else "") + (" *" if row.get("note") else "")
        joules = "-" if row["sparse_joules"] is None else f"{row['sparse_joules'] / row['dense_joules']:.2f}"
        memory = "-" if row["memory"] is None else f"{row['memory']:.3f}"
        cells = [f"{model} x{row['blocks']}{note}", f"`{recipe}`", f"{row['dense_ms']:.1f}", f"{row['sparse_ms']:.1f}"]
        lines.append("| " + " | ".join([*cells, f"**{row['speedup']:.2f}**", joules, memory]) + " |")
    notes = [f"\\* {row['note']}." for row in newest.values() if row.get("note")]
    return [*lines, *(["", *notes] if notes else [])]


def parts_table(rows: list[Row]) -> list[str]:
    lines = ["| part | size | dense | sparse | ratio |", "|---|---|---|---|---|"]
    for row in {(r["recipe"], r["out_features"], r["in_features"]): r for r in rows if r["suite"] == "layer"}.values():
        size = f"{row['out_features']} x {row['in_features']}"
        times = f"{row['dense_ms']:.2f} ms | {row['sparse_ms']:.2f} ms"
        lines.append(f"| one linear, forward and backward, `{row['recipe']}` | {size} | {times} | {row['speedup']:.2f} |")
    products = [row for row in rows if row["suite"] == "products" and row["speedup"]]  # none where the library has no algorithm
    for row in {(r["product"], r["out_features"], r["in_features"]): r for r in products}.values():
        size = f"{row['out_features']} x {row['in_features']}"
        rates = f"{row['dense_tflops']:.0f} TFLOP/s | {row['sparse_tflops']:.0f} TFLOP/s"
        lines.append(f"| `{row['product']}` (dense FP8: {row['fp8_speedup']:.2f}) | {size} | {rates} | {row['speedup']:.2f} |")
    return lines


def kernels_table(rows: list[Row]) -> list[str]:
    """Of the newest run: its kernels are those that there are."""
    kernels = [row for row in rows if row["suite"] == "kernels"]
    lines = ["| pack kernel | TB/s | copy, TB/s |", "|---|---|---|"]
    newest = [row for row in kernels if row["when"] == kernels[-1]["when"]]
    return lines + [f"| {row['kernel']} | {row['tb_per_s']:.2f} | {row['copy_tb_per_s']:.2f} |" for row in newest]


def serving_table(rows: list[Row]) -> list[str]:
    """Nothing until it is measured."""
    newest = {(r["model"], r["phase"], r["batch"], r["length"]): r for r in rows if r["suite"] == "inference"}
    if not newest:
        return []
    lines = ["", "| serving, one call | tokens | dense, ms | sparse, ms | **speed-up** | layers packed | their weights' bytes |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (model, phase, batch, length), row in newest.items():
        cells = [f"{model} x{row['blocks']}, {phase}", f"{batch} x {length}", f"{row['dense_ms']:.3f}", f"{row['sparse_ms']:.3f}"]
        cells += [f"**{row['speedup']:.2f}**", f"{row['packed']} of {row['layers']}", f"{row['weight_bytes']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def bench_table() -> str:
    rows = read("bench.jsonl")
    return "\n".join([*steps_table(rows), "", *parts_table(rows), "", *kernels_table(rows), *serving_table(rows)])


TABLES = {"overhead": overhead_table, "bench": bench_table}


def with_tables(text: str) -> str:
    """The README with its tables as the results say."""
    for name, table in TABLES.items():
        before, start, rest = text.partition(f"<!-- {name} -->")
        after = rest.partition(f"<!-- /{name} -->")[2]
        if not start or not rest.count(f"<!-- /{name} -->"):
            raise ValueError(f"the README has no place for the table {name!r}: <!-- {name} --> ... <!-- /{name} -->")
        text = f"{before}<!-- {name} -->\n{table()}\n<!-- /{name} -->{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in the README")
    if parser.parse_args().write:
        README.write_text(with_tables(README.read_text()))
    else:
        print("\n\n".join(table() for table in TABLES.values()))


if __name__ == "__main__":
    main()
