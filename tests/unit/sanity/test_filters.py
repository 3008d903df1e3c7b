import asyncio
import re

import pytest

from rljax.sanity.filters import check_filter
from rljax.sanity.findings import Severity


async def mixed(group):
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


@pytest.mark.parametrize(
    ("accept", "severity", "line"),
    [
        (mixed, None, ""),
        (lambda group: True, None, ""),
        (lambda group: False, Severity.NOTE, "rejects a made-up group of 4"),
        (lambda group: None, Severity.ERROR, "returns NoneType for a made-up group, not a bool"),
        (lambda group: group.trajectories[0].components["format"] > 0, Severity.WARNING, "raises .* KeyError: 'format'"),
    ],
)
def test_a_filter_is_tried_on_a_made_up_group(accept, severity, line):
    findings = asyncio.run(check_filter(accept, 4))
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert all(re.search(line, finding.line) for finding in findings)
