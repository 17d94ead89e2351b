"""The report: what it says in words, in the table and in its exit status; and that an interrupted one goes on."""

import json
import xml.etree.ElementTree

import pytest

from specjax import cli
from specjax.commands import lossless as command
from specjax.lossless import report as reports
from specjax.lossless.figures import bars, dots
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS, SKIPPED, Finding, Test

ABOUT = {"target": "table", "method": "small", "rule": "rejection", "sampling": {"temperature": 1.0}}
EXACT = Finding("exact law", PASS, "a | b", "largest total variation 1e-16", 0.0)
SEEN = Finding("top <token>", PASS, "counts", "nothing", 1e-4, Test(0.3, 0.8, 4096, 0.02, "TV of a token"))
BET = Finding("bets", PASS, "odds", "little", 1e-4, Test(0.0, None, 4096, 0.03, "TV of a token", e_value=1.5))
ABSENT = Finding("coupled equality", SKIPPED, "tokens", "throws coins of its own", 0.0)
TEETH = Finding("teeth control", PASS, "a planted bias", "found", 0.0, Test(9.0, 1e-60, 4096, 0.02, "TV of a token"))
BAD = Finding("joint law", FAIL, "counts", "p = 1e-30", 1e-4, Test(99.0, 0.0, 4096, 0.1, "TV of the joint"))
BLIND = Finding("joint law", INCONCLUSIVE, "counts", "p = .3", 1e-4, Test(1.0, 0.3, 10, 0.5, "TV of the joint"))
SOUND = (EXACT, ABSENT, SEEN, BET, TEETH)


def report(*findings, lossless=True):
    return reports.Report(ABOUT, 0.02, 1e-3, lossless, findings)


def test_the_headline_says_what_a_manager_needs():
    passed = reports.headline(report(*SOUND))
    assert passed.startswith("PASSED: small drafts verified by rejection on table") and "all 4 tests" in passed
    assert "A bias of 0.02 per token, planted on purpose, was found" in passed and "once in 1,000 times" in passed
    failed = reports.headline(report(*SOUND, BAD))
    assert failed.startswith("NOT LOSSLESS") and "Found by: joint law." in failed and "marked lossy" not in failed
    assert "marked lossy" in reports.headline(report(*SOUND, BAD, lossless=False))
    assert reports.headline(report(*SOUND, BLIND)).startswith("INCONCLUSIVE") and "joint law could not" in reports.headline(
        report(*SOUND, BLIND)
    )
    assert "planted" not in reports.headline(report(EXACT, SEEN)), "no word of a control that was not run"


@pytest.mark.parametrize(
    ("findings", "status"),
    [(SOUND, PASS), ((*SOUND, BAD), FAIL), ((*SOUND, BLIND), INCONCLUSIVE), ((BAD, BLIND), FAIL), ((ABSENT,), SKIPPED)],
)
def test_the_worst_rung_decides(findings, status):
    assert report(*findings).status == status


def test_what_is_written(tmp_path):
    """JSON gives the findings back; tables have a line a rung; the page is whole, and nothing in it is taken for markup."""
    one = report(*SOUND, BAD)
    reports.write(one, tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["status"] == FAIL and tuple(map(reports.from_dict, written["findings"])) == one.findings
    text = (tmp_path / "report.md").read_text()
    assert text.count("\n| ") == 1 + len(one.findings) and "a \\| b" in text and "| – | coupled equality |" in text
    page = (tmp_path / "report.html").read_text()
    assert "top &lt;token&gt;" in page and "<token>" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<tr") == 1 + len(one.findings) + len(ABOUT)


def test_figures_are_whole():
    for drawn in (bars((*SOUND, BAD), 0.02), dots((*SOUND, BAD)), bars((), 0.02), dots(())):
        xml.etree.ElementTree.fromstring(drawn)
    assert bars((*SOUND, BAD), 0.02).count("<rect") == 4 and dots((*SOUND, BAD)).count("<circle") == 3
    assert "#b3151d" in dots((BAD,)).split("<line")[0] and "#b3151d" not in dots((SEEN,)).split("<line")[0]


def test_a_journal_goes_on(tmp_path):
    path = tmp_path / "findings.jsonl"
    journal = reports.Journal(path, ABOUT)
    for finding in (EXACT, SEEN):
        journal.add(finding)
    whole = path.read_text()
    path.write_text(whole + '{"rung": "cut o')  # killed while it wrote
    again = reports.Journal(path, ABOUT)
    assert again.findings == [EXACT, SEEN] and path.read_text() == whole
    again.add(BET)
    assert reports.Journal(path, ABOUT).findings == [EXACT, SEEN, BET]
    with pytest.raises(ValueError, match="another rule: give another --out"):
        reports.Journal(path, {**ABOUT, "rule": "block"})


@pytest.mark.parametrize(("last", "status"), [(TEETH, 0), (BAD, 1), (BLIND, 1)])
def test_the_command(tmp_path, capsys, monkeypatch, last, status):
    """Exit status by the verdict; a second run climbs only what is missing."""
    asked = []

    def climb(subject, *, quick, seed, progress, done):
        asked.append((quick, seed, tuple(done)))
        assert subject.names == ("table", "small", "rejection") and subject.sampling.temperature == 1.0
        yield from (f for f in (EXACT, SEEN, last) if f.rung not in done)

    monkeypatch.setattr(command, "climb", climb)
    words = ["lossless", "--quick", "--seed", "3", "--out", str(tmp_path / "r"), "--json", str(tmp_path / "all.json")]
    assert cli.main(words) == cli.main(words) == status
    assert asked == [(True, 3, ()), (True, 3, ("exact law", "top <token>", last.rung))]
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["summary"]["status"] == last.status and len(written["report"]["findings"]) == 3
    assert capsys.readouterr().out.count("small drafts verified by rejection on table") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "smal"], "'smal'"),
        (["--rule", "reject"], "no rule 'reject'"),
        (["--method", "specinfer", "--rule", "block"], "chains only"),
        (["--plant-bias", "2"], "--plant-bias 2.0 is no total variation"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--num-draft", "0"], "--num-draft 0"),
        (["--method", "specinfer", "--option", "children=idd"], "'idd'"),
        (["--method", "specinfer", "--option", "expansion=3,1,1"], "takes children and weights only"),
        (["--method", "specinfer", "--option", "nonsense=1"], "nonsense"),
        (["--draft-model", "gpt5"], "--draft-model is for real models"),
        (["--prompts", "/nonexistent"], "--prompts is for real models"),
        (["--method", "specinfer", "--rule", "k_seq"], "draws them as 'without_replacement'"),
    ],
)
def test_what_cannot_run_says_so(tmp_path, capsys, words, message):
    assert cli.main(["lossless", "--quick", "--out", str(tmp_path / "r"), *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not (tmp_path / "r").exists()
