"""Make pictures of `reknit dash` and `reknit report` in a headless Chromium, for light and dark pages.

Run: torchrun --nproc-per-node 16 examples/monitoring/slow_ranks.py FOLDER
Then: python examples/monitoring/screenshots.py FOLDER/events docs/howto
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
    tab.locator("#heat").hover(position={"x": 40, "y": 40})
    tab.screenshot(path=folder / f"dash-ranks{suffix}.png")
    tab.set_viewport_size({"width": 1200, "height": 1250})
    tab.evaluate("document.getElementById('storage').scrollIntoView()")
    tab.screenshot(path=folder / f"dash-storage{suffix}.png")


def of_report(tab: Page, folder: Path, suffix: str) -> None:
    """Write a picture of the report, with the slowest ranks first."""
    tab.locator("#lane").select_option(label=PHASE)
    tab.screenshot(path=folder / f"report{suffix}.png")


def main() -> None:
    """Serve the events, write a report of them, and look at both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    args = parser.parse_args()
    command = [sys.executable, "-m", "reknit", "dash", args.events, "--port=0"]
    report = Path(args.events).resolve().with_name("report.html")
    subprocess.run([sys.executable, "-m", "reknit", "report", args.events, "-o", str(report)], check=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dash, sync_playwright() as drivers:
        try:
            line = "" if dash.stdout is None else dash.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise SystemExit(f"reknit dash said {line!r}")
            browser = drivers.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
            for suffix, scheme in SCHEMES.items():
                tab = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme=scheme)
                tab.goto(address[0])
                of_dash(tab, args.folder, suffix)
                tab.close()
                tab = browser.new_page(viewport={"width": 944, "height": 1500}, color_scheme=scheme)
                tab.goto(report.as_uri())
                of_report(tab, args.folder, suffix)
                tab.close()
            browser.close()
        finally:
            dash.terminate()


if __name__ == "__main__":
    main()
