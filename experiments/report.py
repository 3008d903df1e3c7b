"""Writes one HTML page of a run, or of several compared, that opens without a network.

    python -m experiments.report --workdir=runs/quickstart --out=quickstart.html
    python -m experiments.report --workdir=runs/seed1,runs/seed2,runs/seed3 --out=seeds.html

The page of one run has the doctor's verdict first, then curves, histograms, samples to read, and
the protocol. The page of several has means over seeds with 95% intervals, and what differs. Run
directories may be finished, live or of an older version: what they lack is named on the page.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

WORKDIR = flags.DEFINE_multi_string("workdir", [], "The directory of a run; several, with commas or again, are compared.")
OUT = flags.DEFINE_string("out", None, "HTML file to write. One run: WORKDIR/report.html unless given.")


def report() -> None:
    from rljax.diagnosis import History, all_rules, diagnose
    from rljax.diagnosis.report import comparison_page, run_page, short_names

    workdirs = main.run_directories(WORKDIR.value)
    if not workdirs:
        raise UserError("--workdir: missing (the directory of a run)")
    if OUT.value is None and len(workdirs) > 1:
        raise UserError("--out: missing (an HTML file for the comparison)")
    out = workdirs[0] / "report.html" if OUT.value is None else Path(OUT.value)

    rules = all_rules()
    histories = [History.load(workdir) for workdir in workdirs]
    diagnoses = [diagnose(history, rules) for history in histories]
    if len(workdirs) == 1:
        page = run_page(histories[0], diagnoses[0], rules)
    else:
        names = short_names(workdirs)
        page = comparison_page(dict(zip(names, histories, strict=True)), dict(zip(names, diagnoses, strict=True)))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
    print(f"{out}: {len(page.encode()) / 1e6:.1f} MB")
    for workdir, diagnosis in zip(workdirs, diagnoses, strict=True):
        print(f"{workdir}: {diagnosis.verdict()}")


if __name__ == "__main__":
    main.run_main(report)
