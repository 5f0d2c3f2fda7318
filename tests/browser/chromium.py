"""A headless Chromium, driven by selenium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = "chromium", "chromedriver"
"""The programs found on the path."""


@contextlib.contextmanager
def opened() -> Iterator[webdriver.Chrome]:
    """Start the browser, and end it."""
    options = Options()
    options.binary_location = shutil.which(CHROMIUM) or CHROMIUM
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # otherwise it refuses to start as root
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    missing = [name for name in (CHROMIUM, DRIVER) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here, so no browser test runs")
    with opened() as driver:
        yield Browser(driver)


class Browser:
    """A headless Chromium of a given size and color scheme."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path | str, width: int, scheme: str = "light") -> None:
        """Open a file or an address in a window of this width, light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.paint(scheme)
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)

    def paint(self, scheme: str) -> None:
        """Set the system's preference: ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script: str, *arguments: object) -> Any:
        """Return the value of a JavaScript expression."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def network(self) -> tuple[list[str], list[str]]:
        """Return the addresses requested since the page was opened, and the refused ones."""
        asked, refused = [], []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.loadingFailed":
                refused.append(message["params"].get("blockedReason", ""))
        return (asked, refused)

    def complaints(self) -> list[str]:
        """Return the browser's console messages since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]
