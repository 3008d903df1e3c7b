"""docs/doctor.md is what the rules say."""

from pathlib import Path

from rljax.diagnosis import RULES, reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"


def test_the_page_is_of_these_rules():
    assert PAGE.read_text() == reference.page(), "stale: python -m rljax.diagnosis.reference > docs/doctor.md"


def test_every_rule_has_a_section_with_its_metrics_and_thresholds():
    text = PAGE.read_text()
    for rule in RULES:
        section = text.partition(f"#### {rule.id}\n")[2].partition("\n#")[0]
        assert rule.meaning in section
        assert all(f"`{name}`" in section for name in rule.needs)
        assert all(bound.origin in section and repr(bound) in section for bound in rule.bounds)
