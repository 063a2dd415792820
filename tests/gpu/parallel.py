"""Run the GPU tests in several processes (``make test-gpu JOBS=14``): most of their time is compilation on the CPU.

pytest-xdist would do the same, but GPU machines often have no way to install it. Options after the number go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider"]
COMMAND += ["-W", "ignore::pytest.PytestConfigWarning"]


def collect(options: list[str]) -> list[str]:
    """Ids of all tests that the options select."""
    result = subprocess.run([*COMMAND, "--collect-only", *options, str(HERE)], capture_output=True, text=True, check=False)
    found = [line for line in result.stdout.splitlines() if "::" in line]
    if not found:
        sys.exit(result.stdout + result.stderr)
    return found


def main() -> None:
    jobs, options = int(sys.argv[1]), sys.argv[2:]
    tests = collect(options)
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for job in range(min(jobs, len(tests))):
            log = Path(folder) / f"{job}.log"
            # a cache of algorithms for each: none waits for another's search, and none disturbs the user's
            environment = {**os.environ, "NMSPARSE_CACHE": f"{folder}/cache{job}"}
            with log.open("w") as file:
                process = subprocess.Popen([*COMMAND, "-ra", *tests[job::jobs]], stdout=file, stderr=file, env=environment)
            running.append((process, log))
        failed = 0
        for process, log in running:
            failed += process.wait() != 0
            lines = log.read_text().splitlines()
            print("\n".join(lines if process.returncode else lines[-1:]), flush=True)
    print(f"{len(tests)} tests in {len(running)} processes, {failed} of them with failures.")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
