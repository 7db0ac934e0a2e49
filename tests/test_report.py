"""`tilewise report`: a page from one file of every kind, in words and in a browser."""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import browser
import pytest
import stored
from test_cli import error, run

from tilewise.report import html
from tilewise.report.kinds import KINDS, PLOTS
from tilewise.report.pieces import digits, listed, times
from tilewise.report.results import files, read

ROOT = Path(__file__).parent.parent
SHOTS = ROOT / "build" / "report"  # screenshots of this page and of the stored ones
PAGES = sorted((ROOT / "benchmarks" / "results").glob("report-*/index.html"))
IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One result of each kind."""
    made = tmp_path_factory.mktemp("results")
    stored.write_all(made)
    return made


@pytest.fixture(scope="module")
def page(folder):
    """The report of that folder: where it lies, its JSON."""
    out = folder / "report"
    said = run("report", folder, "-o", out, "--json", folder / "found" / "report.json")
    return out, json.loads((folder / "found" / "report.json").read_text()), said


def test_every_kind_is_on_the_page(folder, page):
    out, found, said = page
    assert {kind.title for kind in KINDS} == {r["what"] for r in found["results"]}
    assert found["not_drawn"] == [] and len(found["results"]) == len(list(folder.glob("*.json")))
    text = (out / "index.html").read_text()
    for r in found["results"]:
        assert f'id="{html.slug(Path(r["file"]).stem)}"' in text
        assert stored.GPU in r["of"] or "computed" in r["of"] or "cores" in r["of"]
    assert "wrote" in said and "pictures" in said


def test_the_page_is_one_file_with_pictures_beside_it(page):
    out, found, _ = page
    text = (out / "index.html").read_text()
    names = [name for r in found["results"] for name in r["pictures"]]
    images = IMAGE.findall(text)
    assert sorted(path.name for path in out.glob("*.png")) == sorted(names) and len(images) == len(names) > 25
    assert [base64.b64decode(data) for data, _ in images] == [(out / name).read_bytes() for name in names]
    assert all(alt.endswith(".") for _, alt in images)
    assert not re.search(r'(?:src|href)="(?!data:|#)', text) and "url(" not in text
    anchors = set(re.findall(r'href="#([^"]+)"', text))
    assert anchors and anchors <= set(re.findall(r'id="([^"]+)"', text))
    assert '<meta name="viewport"' in text and "prefers-color-scheme: dark" in text


def test_every_picture_says_what_it_shows_in_numbers(page):
    _, found, _ = page
    for r in found["results"]:
        for name, says in r["pictures"].items():
            assert re.search(r"\d", says) and says.endswith(".") and not re.search(r"\bnan\b|\binf\b", says), name


def test_plots_without_data_are_named_with_their_command(folder, tmp_path):
    said = " ".join(run("report", folder / "lab-compare.json", "-o", tmp_path, "--json", tmp_path / "r.json").split())
    plots = json.loads((tmp_path / "r.json").read_text())["plots"]
    having = {number for number, plot in plots.items() if plot["files"]}
    assert having == {"7"} and plots.keys() == {str(plot.number) for plot in PLOTS}
    text = (tmp_path / "index.html").read_text()
    for plot in PLOTS:
        assert plot.title in text
        if plot.command and plot.number != 7:
            assert f"<code>{plot.command}</code>" in text and plot.command in said


def test_all_plots_that_have_a_command_are_drawn(page):
    plots = page[1]["plots"]
    assert all(plots[str(plot.number)]["files"] for plot in PLOTS if plot.command)
    assert not any(plots[str(plot.number)]["files"] for plot in PLOTS if not plot.command)


def test_strange_and_broken_files_are_named(folder, tmp_path):
    found = json.loads((folder / "lab-compare.json").read_text())
    strange = {
        "good": found,
        "empty": "",
        "list": [1, 2],
        "doctor": {"command": "doctor", "machine": {}},
        "notes": {"what": "TFLOP/s by hand"},
        "homeless": {**found, "machine": None},
        "cut": {name: value for name, value in found.items() if name != "sweep"},
        "odd": {**found, "results": [{"system": "x"}]},
    }
    for name, data in strange.items():
        (tmp_path / f"{name}.json").write_text(data if data == "" else json.dumps(data))
    said = run("report", tmp_path, "-o", tmp_path / "out", "--json", tmp_path / "out" / "r.json", code=1)
    reasons = {
        Path(one["file"]).stem: one for one in json.loads((tmp_path / "out" / "r.json").read_text())["not_drawn"]
    }
    assert reasons.keys() == strange.keys() - {"good"}
    assert {name for name, one in reasons.items() if not one["broken"]} == {"doctor", "notes"}
    assert "lacks 'sweep'" in reasons["cut"]["reason"] and "TFLOP/s by hand" in reasons["notes"]["reason"]
    assert "'doctor' are not drawn" in reasons["doctor"]["reason"] and "no JSON" in reasons["empty"]["reason"]
    assert "on which machine" in reasons["homeless"]["reason"] and "lacks" in reasons["odd"]["reason"]
    text = (tmp_path / "out" / "index.html").read_text()
    assert all(f"<code>{name}.json</code>" in text and f"{name}.json" in said for name in reasons)


def test_errors(tmp_path, folder):
    assert "does not exist" in error("report", tmp_path / "none.json")
    assert "holds no .json file" in error("report", tmp_path)
    shutil.copy(folder / "io.json", tmp_path / "io.json")
    assert "2 files are called io" in error("report", folder / "io.json", tmp_path / "io.json")


def test_numbers_are_written_for_people():
    assert [digits(x) for x in (0, 0.01234, 1.5, 12.34, 12345)] == ["0", "0.0123", "1.50", "12.3", "12,345"]
    assert (times(1.234), times(68.2), listed("ab"), listed(["a"])) == ("1.23x", "68x", "a and b", "a")


# ---- the stored pages ----


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_stored_pages_say_what_stored_results_say(path):
    """Pictures aside (another version of matplotlib draws other bytes), the page is made anew and must be the same."""
    about = json.loads((path.parent / "report.json").read_text())
    sources = [ROOT / one["file"] for one in (*about["results"], *about["not_drawn"])]
    found, unused = read(files(sources))
    anew = html.build(found, unused, draw=lambda panel: b"")
    words = re.compile(r'src="data:image/png;base64,[^"]*"')
    assert words.sub("", path.read_text()) == words.sub("", anew.text), "run `make report`"
    assert set(anew.pictures) == {picture.name for picture in path.parent.glob("*.png")}


# ---- in a browser ----

CHECKS = """() => ({
    width: document.documentElement.scrollWidth,
    undecoded: [...document.images].filter(image => !image.complete || image.naturalWidth === 0).length,
    images: document.images.length,
    outside: [...document.querySelectorAll('main *, header *, nav *')].filter(
        e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1).length,
    small: [...document.querySelectorAll('p, li, td, th, figcaption')].filter(
        e => parseFloat(getComputedStyle(e).fontSize) < 12).length,
    background: getComputedStyle(document.body).backgroundColor,
})"""


def test_pages_in_a_browser(page):
    """At both widths, light and dark: nothing in the console, nothing fetched, every image decoded, no sideways scrolling."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    with browser.browser() as started:
        for path in (page[0] / "index.html", *PAGES):
            backgrounds = set()
            for name, size in browser.WIDTHS.items():
                for scheme in ("light", "dark"):
                    shown, complaints = browser.look(started, path, size, scheme)
                    shot = SHOTS / f"{path.parent.name}-{name}-{scheme}.jpg"
                    shown.screenshot(path=shot, full_page=scheme == "light", type="jpeg", quality=70)
                    for fold in shown.locator("summary").all():
                        fold.click()
                    found = shown.evaluate(CHECKS)
                    assert complaints == []
                    assert found["width"] <= size[0] and found["outside"] == found["undecoded"] == found["small"] == 0
                    assert found["images"] == len(IMAGE.findall(path.read_text())) > 5
                    backgrounds.add(found["background"])
                    shown.context.close()
            assert len(backgrounds) == 2


def test_a_browser_is_there_in_ci(monkeypatch):
    """Without one these tests are skipped, but CI fails."""
    monkeypatch.setattr(browser.shutil, "which", lambda _: None)
    monkeypatch.delenv("TILEWISE_BROWSER", raising=False)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"browser|playwright"):
        browser.find()
    monkeypatch.setitem(os.environ, "CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"browser|playwright"):
        browser.find()
