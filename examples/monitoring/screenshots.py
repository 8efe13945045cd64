"""Make pictures of `reknit dash`, `reknit report` and `reknit show --html`, for light and dark pages.

Run: torchrun --nproc-per-node 16 examples/monitoring/slow_ranks.py FOLDER
Then: python examples/monitoring/screenshots.py FOLDER docs/howto
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, sync_playwright

PHASE = "write (agent)"
SCHEMES: dict[str, Literal["light", "dark"]] = {"": "light", "-dark": "dark"}


def of_dash(tab: Page, folder: Path, suffix: str) -> None:
    """Write pictures of the dashboard, as somebody uses it who looks for slow ranks."""
    tab.get_by_text("live", exact=True).wait_for()
    tab.locator("#lane").select_option(label=PHASE)
    tab.locator("#heat").hover(position={"x": 150, "y": 65})
    tab.screenshot(path=folder / f"dash-ranks{suffix}.png")
    tab.set_viewport_size({"width": 1200, "height": 1250})
    tab.evaluate("document.getElementById('of-bytes').scrollIntoView({behavior: 'instant'})")
    tab.screenshot(path=folder / f"dash-storage{suffix}.png")


def of_report(tab: Page, folder: Path, suffix: str) -> None:
    """Write a picture of the report, with the slowest ranks first."""
    tab.locator("#rows").select_option("last")
    tab.screenshot(path=folder / f"report{suffix}.png")


def of_map(tab: Page, folder: Path, suffix: str) -> None:
    """Write a picture of a checkpoint, with the reads of another layout."""
    tab.locator("#matrix").hover(position={"x": 170, "y": 45})
    tab.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    tab.screenshot(path=folder / f"map{suffix}.png")


def main() -> None:
    """Serve the events of a run, write a report of them and a picture of its last step, and look at all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    args = parser.parse_args()
    run, program = args.run.resolve(), [sys.executable, "-m", "reknit"]
    report, drawn, events = run / "report.html", run / "map.html", str(run / "events")
    command = [*program, "dash", events, "--port=0"]
    last = max(run.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    subprocess.run([*program, "report", events, "-o", str(report)], check=True)
    subprocess.run([*program, "show", str(last), "--html", str(drawn), "--layout", "dp=3,tp=2"], check=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dash, sync_playwright() as drivers:
        try:
            line = "" if dash.stdout is None else dash.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise SystemExit(f"reknit dash said {line!r}")
            browser = drivers.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
            for suffix, scheme in SCHEMES.items():
                tab = browser.new_page(viewport={"width": 1200, "height": 1200}, color_scheme=scheme)
                tab.goto(address[0])
                of_dash(tab, args.folder, suffix)
                tab.close()
                tab = browser.new_page(viewport={"width": 1200, "height": 820}, color_scheme=scheme)
                tab.goto(report.as_uri())
                of_report(tab, args.folder, suffix)
                tab.set_viewport_size({"width": 1200, "height": 1560})
                tab.goto(drawn.as_uri())
                of_map(tab, args.folder, suffix)
                tab.close()
            browser.close()
        finally:
            dash.terminate()


if __name__ == "__main__":
    main()
