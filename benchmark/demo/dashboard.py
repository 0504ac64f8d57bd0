"""A picture of a running server's live page, in headless Chromium: ``python benchmark/demo/dashboard.py``.

Needs requirements/browser.txt and Chromium (``make test-browser`` installs both).
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1080, 660


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server")
    parser.add_argument("--api-key", help="where the server wants one")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the page is open before")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--out", type=Path, default=Path("docs/dashboard.png"))
    return parser.parse_args()


def main() -> None:
    """Open the page, wait for figures, write the picture."""
    args = parse_arguments()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium: install it (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=args.scheme)
        page.goto(f"{args.base_url}/dashboard")
        if args.api_key is not None:
            page.get_by_label("API key of this server").fill(args.api_key)
            page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        page.wait_for_timeout(1000 * args.seconds)
        page.screenshot(path=args.out)
        browser.close()


if __name__ == "__main__":
    main()
