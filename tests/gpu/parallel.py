"""Run the GPU tests in several processes (``make test-gpu JOBS=14``): most of their time is compilation on the CPU.

Slow tests have a process each; tests whose verdict is a time run afterwards, alone. pytest-xdist would do much the same, but GPU
machines often have no way to install it. Options after the number go to pytest. Each process is shown when it ends; with
``NMSPARSE_TEST_LOGS=FOLDER`` its whole log is there from the start, so that a run that is cut off leaves what it got to.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
NOTHING_COLLECTED = 5
COMMAND = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
COMMAND += ["-W", "ignore::pytest.PytestConfigWarning"]


def collect(options: list[str]) -> list[str]:
    """Ids of all tests that the options select."""
    result = subprocess.run([*COMMAND, "--collect-only", *options, str(HERE)], capture_output=True, text=True, check=False)
    if result.returncode not in (0, NOTHING_COLLECTED):
        sys.exit(result.stdout + result.stderr)
    return [line for line in result.stdout.splitlines() if "::" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the GPU tests in several processes.")
    parser.add_argument("jobs", type=int)
    parser.add_argument("-m", dest="marked", default="gpu", help="further markers, as for pytest")
    given, options = parser.parse_known_args()
    marked = f"gpu and ({given.marked})"  # pytest takes the last -m only
    kinds = ("not alone and slow", "not alone and not slow", "alone")
    with ThreadPoolExecutor() as pool:
        slow, quick, alone = pool.map(lambda kind: collect(["-m", f"{marked} and {kind}", *options]), kinds)
    if not slow + quick + alone:
        sys.exit("no GPU test fits these options.")
    jobs = max(1, given.jobs - len(slow))
    together = [[test] for test in slow] + [quick[job::jobs] for job in range(min(jobs, len(quick)))]
    failed = run("together", together) + run("alone", [alone] if alone else [])
    print(f"{len(slow + quick)} tests in {len(together)} processes, then {len(alone)} alone; {failed} processes with failures.")
    sys.exit(bool(failed))


def run(label: str, shares: list[list[str]]) -> int:
    """Run each share of the tests in a process; return how many of these had failures."""
    failed, running = 0, {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, len(shares))) as waiting:
        logs = Path(os.environ.get("NMSPARSE_TEST_LOGS", folder))
        logs.mkdir(parents=True, exist_ok=True)
        for job, tests in enumerate(shares):
            log = logs / f"{label}-{job}.log"
            # a cache of algorithms for each: none waits for another's search, and none disturbs the user's
            environment = {**os.environ, "NMSPARSE_CACHE": f"{folder}/cache{job}"}
            with log.open("w") as file:
                process = subprocess.Popen([*COMMAND, "-ra", *tests], stdout=file, stderr=file, env=environment)
            running[waiting.submit(process.wait)] = process, log
        for ended in as_completed(running):
            process, log = running[ended]
            failed += process.returncode != 0
            lines = log.read_text().splitlines()
            print("\n".join(lines if process.returncode else lines[-1:]), flush=True)
    return failed


if __name__ == "__main__":
    main()
