"""Make pictures of `reknit dash` in a headless Chromium, for the documentation.

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

from playwright.sync_api import Page, sync_playwright

PHASE = "write (agent)"


def take(tab: Page, folder: Path) -> None:
    """Write pictures of what somebody sees who looks for slow ranks."""
    tab.get_by_text("live", exact=True).wait_for()
    tab.locator("#lane").select_option(label=PHASE)
    tab.locator("#heat").hover(position={"x": 40, "y": 40})
    tab.screenshot(path=folder / "dash-ranks.png")
    tab.set_viewport_size({"width": 1200, "height": 1250})
    tab.evaluate("document.getElementById('storage').scrollIntoView()")
    tab.screenshot(path=folder / "dash-storage.png")


def main() -> None:
    """Serve the events, and look at them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    args = parser.parse_args()
    command = [sys.executable, "-m", "reknit", "dash", args.events, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dash, sync_playwright() as drivers:
        try:
            line = "" if dash.stdout is None else dash.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise SystemExit(f"reknit dash said {line!r}")
            browser = drivers.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme="light")
            tab.goto(address[0])
            take(tab, args.folder)
            browser.close()
        finally:
            dash.terminate()


if __name__ == "__main__":
    main()
