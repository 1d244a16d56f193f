"""Drive the real frontend through browser.mjs (node, playwright-core and Chromium)."""

import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

DRIVER = Path(__file__).parent / "browser.mjs"


@cache
def why_no_browser() -> str | None:
    """What is missing for the frontend lanes, or None."""
    if shutil.which("node") is None:
        return "needs node"
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    if not Path(chromium).exists():
        return f"needs Chromium at {chromium} (or CHROMIUM=path)"
    package = os.environ.get("PLAYWRIGHT_CORE", "playwright-core")
    found = subprocess.run(["node", "-e", "require.resolve(process.argv[1])", package], capture_output=True)
    if found.returncode:
        return f"needs the node package playwright-core (PLAYWRIGHT_CORE=path; looked for {package})"
    return None


class Browser:
    """One Chromium start a call, with an empty profile."""

    def __call__(self, server: str, *, timeout: float = 180, **job) -> dict:
        """Run one job of browser.mjs and return its report; an exception in the page is raised here."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.json"
            path.write_text(json.dumps({"server": server, "timeout": int(timeout * 1000), **job}, default=str))
            # Chromium inherits the pipes: a process group of its own, so that all of it ends with the call
            process = subprocess.Popen(
                ["node", str(DRIVER), str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )
            try:
                out, err = process.communicate(timeout=timeout + 60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                raise
        if not out.strip():
            raise RuntimeError(f"browser.mjs printed nothing:\n{err[-2000:]}")
        report = json.loads(out.strip().splitlines()[-1])
        if "exception" in report:
            raise RuntimeError(report.pop("exception") + "\n" + json.dumps(report))
        return report


def problems(report: dict) -> dict:
    """Everything in a report that a user would see as wrong; {} for a good one."""
    keys = ("missing", "dialogs", "page_errors", "bad_responses")
    return {key: report[key] for key in keys if report[key]}
