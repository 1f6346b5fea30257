"""A headless Chromium for pages that commands write; tests skip where there is none."""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium():
    """A browser of playwright, which drives an installed Chromium; skips the test without either."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (scripts/install_browser)")
    with api.sync_playwright() as playwright:
        # Chromium's own sandbox does not start as root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
