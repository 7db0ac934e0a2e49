"""A headless Chromium for tests of pages: what it complains about, and screenshots."""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


def find():
    """The path of a browser that is installed.

    Without one (or without playwright, which drives it) the test is skipped; in CI it fails: `make test` installs both.
    """
    path = next(filter(None, (os.environ.get("TILEWISE_BROWSER"), *map(shutil.which, NAMES))), None)
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        path, missing = None, "playwright is not installed: pip install playwright"
    else:
        missing = f"no browser: none of {', '.join(NAMES)} is on PATH (Debian: apt-get install chromium)"
    if path is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    return path


@contextmanager
def browser():
    """The browser, running."""
    path = find()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def look(started, page_file, size, scheme="light"):
    """Open a file at this size, return (page, complaints): console messages, errors, requests beyond the file itself."""
    width, height = size
    context = started.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=2 if width < 600 else 1,
        offline=True,
    )
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url[:80]}"))
    own = page_file.resolve().as_uri()

    def check(request):
        if request.url != own and not request.url.startswith("data:"):
            complaints.append(f"request: {request.url[:80]}")

    page.on("request", check)
    page.goto(own, wait_until="load")
    return page, complaints
