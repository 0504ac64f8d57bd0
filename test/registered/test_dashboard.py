"""The page at /dashboard: its data, its keys, and itself in a browser. Run alone: pytest THIS_FILE

The browser is Chromium with Playwright's Python client (`make test-browser` installs both); without them the
tests that need it are skipped.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from helpers.server import ServerTestCase, speculative_flags, write_tiny_pair

if TYPE_CHECKING:
    from playwright.sync_api import Page

API_KEY, ADMIN_KEY = "reader", "keeper"
PARAMS = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


HAS_BROWSER = importlib.util.find_spec("playwright") is not None and find_chromium() is not None


class DashboardTestCase(ServerTestCase):
    headers = {"authorization": f"Bearer {API_KEY}".encode()}

    @classmethod
    def server_flags(cls) -> list[str]:
        target, drafter = write_tiny_pair(cls.models)
        flags = ["--model-path", str(target), *speculative_flags(drafter, threshold=2)]
        flags += ["--speculative-capture-max-bs", "6", "--served-model-name", "tiny"]
        return [*flags, "--api-key", API_KEY, "--admin-api-key", ADMIN_KEY]

    def data(self, after: int = 0) -> Any:
        return self.client.get(f"/dashboard/data?after={after}").json()

    def run_streams(self, count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda i: self.generate(text=f"{i}", sampling_params=PARAMS), range(count)))

    def set_threshold(self, value: int) -> None:
        body = {"server_args": {"speculative_disable_bs_threshold": value}}
        headers = {"x-api-key": ADMIN_KEY}
        self.assertEqual(self.client.post("/set_internal_state", json=body, headers=headers).status_code, 200)

    def setUp(self) -> None:
        self.set_threshold(2)


class TestDashboard(DashboardTestCase):
    def test_the_page_is_open_and_its_data_are_not(self) -> None:
        page = self.client.get("/dashboard", headers={"authorization": ""})
        self.assertEqual((page.status_code, page.headers["content-type"]), (200, "text/html; charset=utf-8"))
        self.assertIn("default-src 'none'", page.headers["content-security-policy"])
        self.assertEqual(self.client.get("/dashboard/data", headers={"authorization": ""}).status_code, 401)

    def test_the_page_needs_nothing_from_elsewhere(self) -> None:
        self.assertEqual(re.findall(r"https?://|src=|@import|url\(", self.client.get("/dashboard").text), [])

    def test_steps_come_once(self) -> None:
        before = self.data()["last_step"]
        self.run_streams(4)
        first = self.data(before)
        self.assertEqual([s[0] for s in first["steps"]], list(range(before + 1, first["last_step"] + 1)))
        self.assertEqual(self.data(first["last_step"])["steps"], [])
        modes = {(draft_len > 0, rows > 2) for _, draft_len, rows, _ in first["steps"]}
        self.assertIn((False, True), modes)
        self.assertNotIn((True, True), modes)
        self.assertEqual(first["decode_steps"], self.server_state()["decode_steps"])

    def test_a_number_that_is_none(self) -> None:
        self.assertEqual(self.client.get("/dashboard/data?after=many").status_code, 400)
        for after in (-5, 10**40):
            self.assertEqual(self.client.get(f"/dashboard/data?after={after}").status_code, 200)

    @unittest.skipUnless(HAS_BROWSER, "no Chromium or no playwright: make test-browser")
    def test_in_a_browser(self) -> None:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            try:
                self.use(browser.new_page(color_scheme="light"))
                grounds = [self.ground(browser.new_page(color_scheme=name)) for name in ("light", "dark")]
                self.assertNotEqual(*grounds)
            finally:
                browser.close()

    def use(self, page: Page) -> None:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"{self.server.url}/dashboard")
        page.get_by_label("API key of this server").fill(API_KEY)
        page.keyboard.press("Enter")
        page.get_by_text("live", exact=True).wait_for()
        self.see_steps(page)
        self.change_threshold(page)
        self.assertEqual(errors, [])
        self.assertEqual([url for url in urls if not url.startswith((self.server.url, "data:"))], [])

    def ground(self, page: Page) -> str:
        page.goto(f"{self.server.url}/dashboard")
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    def see_steps(self, page: Page) -> None:
        self.run_streams(4)
        self.run_streams(1)
        page.locator("#legend").get_by_text(re.compile(r"^spec\(3\): \d+$")).wait_for()
        page.locator("#legend").get_by_text(re.compile(r"^plain: \d+$")).wait_for()
        self.assertEqual(page.locator("#accept tr").count(), 3)
        strip = page.locator("#strip")
        drawn = strip.evaluate(
            "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 0)"
        )
        self.assertTrue(drawn)
        strip.focus()
        page.keyboard.press("End")
        last = page.locator("#step-text").inner_text()
        self.assertRegex(last, r"^Step [\d,]+: (plain|spec\(3\)), \d requests, \d+ tokens\.$")
        page.keyboard.press("ArrowLeft")
        self.assertNotEqual(page.locator("#step-text").inner_text(), last)

    def change_threshold(self, page: Page) -> None:
        """By keyboard alone. First without the admin key, then with a wrong one, then with it."""
        field = page.get_by_label("Speculate up to this many decoding requests")
        field.fill("5")
        page.keyboard.press("Enter")
        page.get_by_text("This needs the admin key.").wait_for()
        page.keyboard.type("wrong")  # the field has the focus
        page.keyboard.press("Enter")
        page.get_by_text("The server does not take this admin key.").wait_for()
        page.keyboard.type(ADMIN_KEY)
        page.keyboard.press("Enter")
        page.get_by_text("Set to 5.").wait_for()
        self.assertEqual(self.data()["speculative_disable_bs_threshold"], 5)
        page.get_by_text("In force: speculative up to 5 decoding requests").wait_for()
        field.fill("7")
        page.keyboard.press("Enter")
        page.get_by_text(re.compile("they were prepared for at most 6")).wait_for()
        field.fill("always")
        page.keyboard.press("Enter")
        page.get_by_text("Set to always.").wait_for()
        self.assertIsNone(self.data()["speculative_disable_bs_threshold"])
